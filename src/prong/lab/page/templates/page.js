// A chart is as high as its plot and its legend need at its width: plotly alone would take the legend off the plot.
const fit = chart => {
  const {_size: size, height, meta} = chart._fullLayout;
  const missing = Math.round((meta.aspect ? meta.aspect * size.w : meta.plot) - size.h);
  if (Math.abs(missing) <= 2 || chart.fits++ > 5) return;
  chart.style.height = `${height + missing}px`;
  Plotly.relayout(chart, {height: height + missing});
};
const charts = document.querySelectorAll(".js-plotly-plot");
for (const chart of charts) {
  chart.fits = 0;
  chart.on("plotly_afterplot", () => fit(chart));
}
addEventListener("resize", () => charts.forEach(chart => { chart.fits = 0; }));
addEventListener("load", () => dispatchEvent(new Event("resize")));  // charts were drawn before `fit` was there
