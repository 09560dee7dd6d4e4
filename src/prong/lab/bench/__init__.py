"""What PRONG costs: `prong bench step-cost`, `refresh`, `scaling`, and the page that shows it."""
