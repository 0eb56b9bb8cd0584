"""Configuration: frozen pydantic models, read from YAML, overridden by ``--set a.b=c``.

Unknown keys are refused. :meth:`Config.result_part` is the part that decides the bytes of an index: where the
work runs (``cluster.executor``, ``cluster.workers``) and where it reads and writes are left out.
"""

from __future__ import annotations

import copy
import difflib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

import pydantic
import yaml
from pydantic import Field

from hippoindex.cluster.task_queue import Limits
from hippoindex.errors import UsageError


class Section(pydantic.BaseModel):
    """A frozen group of settings that refuses unknown keys, and numbers that are not finite."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class CorpusConfig(Section):
    """Where passages come from and what their fields are called."""

    path: tuple[str, ...] = ()
    """Files, folders or glob patterns."""
    format: Literal["auto", "jsonl", "json", "parquet", "csv", "text"] = "auto"
    id: str = "id"
    title: str = "title"
    text: str = "text"

    @pydantic.field_validator("path", mode="before")
    @classmethod
    def _one_or_many(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value


class ChunkConfig(Section):
    """Optional splitting of documents into passages, on sentence boundaries."""

    max_tokens: int | None = Field(default=None, ge=8)
    """Longest passage in tokens of the embedding model; ``None`` keeps documents whole."""
    overlap_tokens: int = Field(default=0, ge=0)

    @pydantic.model_validator(mode="after")
    def _overlap_fits(self) -> ChunkConfig:
        if self.max_tokens is not None and self.overlap_tokens >= self.max_tokens:
            raise ValueError("chunk.overlap_tokens must be smaller than chunk.max_tokens")
        return self


class PriceConfig(Section):
    """US dollars for a million tokens."""

    prompt: float = Field(ge=0)
    cached: float = Field(default=0.0, ge=0)
    """Prompt tokens that were in the server's prefix cache."""
    generated: float = Field(ge=0)


class VllmConfig(Section):
    """vLLM in the worker. What is named here has vLLM's meaning, ``device`` apart."""

    device: Literal["gpu", "cpu"] = "gpu"
    """``cpu`` is for vLLM's CPU build."""
    tensor_parallel: int = Field(default=1, ge=1)
    pipeline_parallel: int = Field(default=1, ge=1)
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    max_model_len: int | None = Field(default=None, ge=64)
    """Context; ``None`` is the model's own."""
    max_num_seqs: int = Field(default=256, ge=1)
    """Sequences at once."""
    gpu_memory_utilization: float = Field(default=0.9, gt=0.0, le=1.0)
    enforce_eager: bool = False
    trust_remote_code: bool = False
    """Whether code that comes with the model may run."""
    gpu_hour_usd: float | None = Field(default=None, ge=0)
    """What an hour of one GPU costs; ``None`` takes the price of ``configs/gpus.yaml`` for its kind."""

    @property
    def gpus(self) -> int:
        """GPUs of one engine."""
        return self.tensor_parallel * self.pipeline_parallel if self.device == "gpu" else 0


class EngineConfig(Section):
    """How a language model is asked, whatever for."""

    section: ClassVar[str]
    """Name of the section of the configuration, for messages."""

    model: str | None = None
    """``openai``: name of the model that the endpoint serves. ``vllm``: folder or name of the model."""
    prompts: str | None = None
    """A YAML file of prompts; ``None`` takes the packaged one."""
    structured: Literal["auto", "json_schema", "json_object", "none"] = "auto"
    """How answers are held to JSON: ``response_format`` of one of the two types, or the prompt alone;
    ``auto`` takes the first that the server accepts."""
    max_output_tokens: int = Field(default=2048, ge=16)
    """Longest answer; one that is cut is asked for once more with twice as many."""
    max_attempts: int = Field(default=3, ge=1)
    """Times that a question is put whose answers are not what was asked for."""

    vllm: VllmConfig = VllmConfig()
    base_url: str = "http://127.0.0.1:8000/v1"
    api_key_env: str = "OPENAI_API_KEY"
    """Name of the environment variable that holds the key; the key itself is never stored."""
    cache: str | None = None
    """Folder of the answers that were paid for: the same request is not sent twice."""
    concurrency: int = Field(default=16, ge=1)
    """Most requests at once. This limit and those a second and of US dollars are for all workers together."""
    shards_in_flight: int = Field(default=12, ge=1)
    """Shards that a worker is at, at once, so that its engine does not run empty at the end of one."""
    tokens_in_flight: int | None = Field(default=None, ge=1)
    """Tokens of texts and their expected answers that a worker is at, at once."""
    requests_per_s: float | None = Field(default=None, gt=0)
    tokens_per_s: float | None = Field(default=None, gt=0)
    max_usd: float | None = Field(default=None, gt=0)
    """The run stops before it spends more; needs ``price_usd``."""
    price_usd: PriceConfig | None = None
    timeout_s: float = Field(default=120.0, gt=0)
    """For one request."""
    request_attempts: int = Field(default=8, ge=1)
    """Times that a request is sent that fails with 5xx, a timeout or a lost connection."""
    patience_s: float = Field(default=600.0, gt=0)
    """How long a server may be too busy (429, 503) or away before the run stops."""

    @pydantic.field_validator("cache")
    @classmethod
    def _seen_from_here(cls, value: str | None) -> str | None:
        """Make a path absolute: a worker's own folder may be another one."""
        return None if value is None else str(Path(value).expanduser().absolute())


class ExtractConfig(EngineConfig):
    """OpenIE: entities and triples of every passage."""

    section = "extract"

    engine: Literal["rules", "import", "openai", "vllm"] = "rules"
    path: str | None = None
    """``import``: the file of OpenIE results."""
    model: str | None = None
    """As for every language model; ``rules``: the spaCy model."""
    arguments: Literal["names", "clauses"] = "names"
    """``rules``: ``names`` are short phrases, fit to be nodes; ``clauses`` are whole arguments, as benchmarks
    of OpenIE have them."""
    mode: Literal["two-turn", "joint"] = "two-turn"
    """Entities and then triples in two turns of one conversation, or both in one answer."""
    max_passage_tokens: int | None = Field(default=None, ge=16)
    """Longer passages are asked about in parts, cut between sentences, and put together again."""
    passage_overlap_tokens: int = Field(default=32, ge=0)
    max_passage_chars: int = Field(default=100_000, ge=1)
    """Longer passages are quarantined: split them with ``chunk.max_tokens``."""

    @pydantic.model_validator(mode="after")
    def _overlap_fits(self) -> ExtractConfig:
        if self.max_passage_tokens is not None and self.passage_overlap_tokens >= self.max_passage_tokens:
            raise ValueError("extract.passage_overlap_tokens must be smaller than extract.max_passage_tokens")
        return self

    @pydantic.model_validator(mode="after")
    def _engine_has_arguments(self) -> ExtractConfig:
        if self.arguments != "names" and self.engine != "rules":
            raise ValueError(f"extract.arguments={self.arguments} needs extract.engine=rules")
        return self


class ReaderConfig(EngineConfig):
    """The language model at question time: recognition memory, chains of thought, answers."""

    section = "reader"

    engine: Literal["openai", "vllm"] | None = None
    """``None`` is no language model: recognition memory is off then, and nothing is answered."""
    max_output_tokens: int = Field(default=512, ge=16)
    """Longest answer; one that is cut is asked for once more with twice as many."""
    recognition: bool = True
    """Whether the model chooses among the facts nearest to a question (HippoRAG 2's recognition memory)."""
    passages: int = Field(default=5, ge=1)
    """Passages that a thought or an answer is given."""


#: Settings of ``extract`` that say where and how fast, not what.
_VLLM_EFFORT = {
    "device",
    "tensor_parallel",
    "pipeline_parallel",
    "max_num_seqs",
    "gpu_memory_utilization",
    "enforce_eager",
    "trust_remote_code",
    "gpu_hour_usd",
}
_EXTRACT_EFFORT: dict[str, Any] = {
    **dict.fromkeys(
        (
            "path",
            "prompts",
            "base_url",
            "api_key_env",
            "cache",
            "concurrency",
            "shards_in_flight",
            "tokens_in_flight",
            "requests_per_s",
            "tokens_per_s",
            "max_usd",
            "price_usd",
            "timeout_s",
            "request_attempts",
            "patience_s",
        ),
        True,
    ),
    "vllm": _VLLM_EFFORT,
}


_EMBED_EFFORT: dict[str, Any] = {
    **dict.fromkeys(
        ("trust_remote_code", "batch_texts", "base_url", "api_key_env", "concurrency", "timeout_s"), True
    ),
    "vllm": _VLLM_EFFORT,
}


class EmbedInstructions(Section):
    """What is put before a text, for models that are told what it is."""

    document: str = ""
    query_to_fact: str = ""
    query_to_passage: str = ""

    def of(self, role: Literal["document", "query_to_fact", "query_to_passage"]) -> str:
        """Return the one of a role."""
        return {
            "document": self.document,
            "query_to_fact": self.query_to_fact,
            "query_to_passage": self.query_to_passage,
        }[role]


class EmbedConfig(Section):
    """Vectors of phrases, facts, passages and queries."""

    engine: Literal["onnx", "openai", "sentence-transformers", "vllm"] = "onnx"
    model: str = "all-MiniLM-L6-v2"
    precision: Literal["fp32", "int8"] = "int8"
    """``onnx``: arithmetic of the model."""
    dtype: Literal["float16", "float32"] = "float16"
    """Type of the stored vectors."""
    max_tokens: int = Field(default=256, ge=8, le=32_768)
    dimension: int | None = Field(default=None, ge=1)
    """Width of the vectors, for all engines but ``onnx``."""
    instructions: EmbedInstructions = EmbedInstructions()
    """For all engines but ``onnx``."""
    trust_remote_code: bool = False
    """Whether code that comes with the model may run."""
    batch_texts: int = Field(default=64, ge=1)
    base_url: str = "http://127.0.0.1:8000/v1"
    api_key_env: str = "OPENAI_API_KEY"
    concurrency: int = Field(default=8, ge=1)
    """``openai``: most requests at once, of each worker."""
    timeout_s: float = Field(default=120.0, gt=0)
    vllm: VllmConfig = VllmConfig()

    @pydantic.model_validator(mode="after")
    def _no_unused_instructions(self) -> EmbedConfig:
        if self.engine == "onnx" and self.instructions != EmbedInstructions():
            raise ValueError("embed.instructions are for other engines: the models of onnx take none")
        return self


class SynonymsConfig(Section):
    """Synonym edges: pairs of phrases with cosine >= threshold."""

    method: Literal["auto", "exact", "ivf", "reference", "cupy", "cupy-float32", "faiss-gpu"] = "auto"
    """``auto`` compares all phrases where that is cheap and goes by inverted lists (``ivf``) above; ``cupy``
    and ``faiss-gpu`` compare all on a GPU."""
    threshold: float = Field(default=0.8, gt=0.0, le=1.0)
    max_neighbors: int = Field(default=100, ge=1)
    min_alphanumerics: int = Field(default=3, ge=0)
    """Phrases with fewer letters and digits (of any script) search no synonyms; others may find them."""
    target_recall: float = Field(default=0.99, gt=0.0, le=1.0)
    """Share of the pairs that must be found; less is warned of, and fails a strict run."""
    recall_sample: int = Field(default=1000, ge=1)
    """Phrases on which the recall is measured."""
    guard: Literal["none", "names"] = "none"
    """``names`` drops pairs whose numbers or years differ: "World War I" and "World War II"."""
    memory_bytes: int = Field(default=2**30, ge=2**20)
    """Working memory to aim at, besides vectors and pairs."""


class GraphConfig(Section):
    """Nodes and edge weights of the graph."""

    ner_nodes: bool = True
    """Named entities become nodes too; HippoRAG keeps only the ends of triples."""
    weights: Literal["plain", "hipporag"] = "plain"
    normalisation: Literal["unicode", "hipporag"] = "unicode"
    title_weight: float = Field(default=1.0, ge=0.0)
    """The edge of a passage with m phrases to that of its title weighs 1 + this times m: with 1 a walk goes
    from a passage to its title about as often as to all else. 0 makes a title a phrase like any other, as in
    HippoRAG."""
    memory_bytes: int = Field(default=2**31, ge=2**20)
    """Working memory to aim at when phrases and facts are numbered and the graph is built, besides some bytes
    per phrase and passage. It changes no byte of the result."""


class PrecomputeConfig(Section):
    """Pieces of Personalized PageRank that are computed once, for ``retrieve.damping``."""

    enabled: bool = True
    dtype: Literal["float16", "float32"] = "float32"
    """Type of the stored passage columns."""
    tolerance: float = Field(default=1e-6, ge=1e-6)
    """L1 error of each column, relative; float32 does not reach much less."""
    memory_bytes: int = Field(default=2**30, ge=2**20)
    """Budget of one block of columns. It changes no byte of the result."""


class RetrieveConfig(Section):
    """Defaults of retrieval, stored with the index and overridable per call."""

    method: str = "hippoindex"
    top_k: int = Field(default=10, ge=1)
    damping: float = Field(default=0.5, gt=0.0, lt=1.0)
    """Probability of continuing the walk (HippoRAG: 0.5)."""
    passage_weight: float = Field(default=0.05, ge=0.0)
    """Weight of the dense passage score in the restart vector (HippoRAG 2: 0.05)."""
    fact_top_k: int = Field(default=5, ge=1)
    phrase_top_k: int | None = Field(default=None, ge=1)
    """Phrases kept of those of the nearest facts; ``None`` is 5 for ``hipporag2``, all for ``hippoindex``."""
    entity_min_cosine: float = Field(default=0.6, ge=-1.0, le=1.0)
    """``hippoindex``: an entity whose nearest phrase is not above this joins no fact's phrases as a seed."""
    entity_weight: float = Field(default=1.0, ge=0.0)
    """``hippoindex``: exponent of the walk from the entities alone."""
    dense_weight: float = Field(default=8.0, ge=0.0)
    """``hippoindex``: what the nearest passage's log score gains over the farthest's."""
    pair_weight: float = Field(default=18.0, ge=0.0)
    """``hippoindex``: what the log score of a passage gains that has all words of the question, by itself or
    with one whose title it names or that names its title."""
    pair_exponent: float = Field(default=3.0, gt=0.0)
    """``hippoindex``: with a share h of the words, it gains this power of h times as much."""
    pair_top_k: int = Field(default=200, ge=1)
    """``hippoindex``: passages, the best so far, that can gain by that."""
    feedback_weight: float = Field(default=1.0, ge=0.0)
    """``hippoindex``: exponent of the walk from the passages found so far."""
    feedback_top_k: int = Field(default=10, ge=1)
    """``hippoindex``: passages from which that walk starts."""
    floor: float = Field(default=1e-3, gt=0.0, le=1.0)
    """``hippoindex``: what a passage that a walk does not reach has of the best one's probability."""
    linking: Literal["ner-to-node", "query-to-node", "query-to-fact"] | None = None
    """How questions find seeds, for ``hipporag1`` and ``hipporag2``; ``None`` is each one's own way."""
    node_specificity: bool = True
    """Whether a seed's weight is divided by the number of passages that hold the phrase."""
    synonym_edges: bool = True
    """Whether walks follow synonym edges."""
    passage_nodes: bool | None = None
    """``hipporag1`` and ``hipporag2``: walk passages too and rank them by their own node, or walk phrases
    alone and rank passages by the sum of theirs; ``None`` is each one's own way."""
    walk: Literal["ppr", "seeds", "neighbours"] = "ppr"
    """In place of PPR: the seeds' own weights, or those and half the least of them for each neighbour."""
    ensemble_cosine: float | None = Field(default=None, ge=-1.0, le=1.0)
    """``hipporag1``: where the farthest entity's nearest phrase is not above this, scaled graph and dense
    scores are averaged (HippoRAG: 0.9); ``None`` never."""
    mentions: Literal["once", "per-fact"] = "once"
    """How often a phrase counts in a passage's sum: HippoRAG 1's code counts it once for each fact."""
    ties: Literal["first", "last"] = "first"
    """Which of equally scored passages comes first, by row; HippoRAG's code takes the last one."""
    solver: Literal["auto", "push", "power"] = "auto"
    """``push`` starts from the seeds alone and takes the passages' part from what was precomputed; ``power``
    iterates over the whole graph. ``auto`` pushes where the index holds the pieces for this damping."""
    epsilon: float | None = Field(default=None, gt=0.0)
    """``push`` leaves at most this much unspread mass per unit of degree on a node, of a total of 1; ``None``
    is 3e-6 for ``hippoindex``, whose floor hides more than that, and 1e-8 for the others."""
    tolerance: float = Field(default=1e-6, gt=0.0)
    """L1 error at which ``power`` stops."""
    memory_bytes: int = Field(default=512 * 2**20, ge=2**20)
    """Budget of one block of ``power``."""


class ClusterConfig(Section):
    """Where the work runs, and how large a unit of work is. None of it changes a byte of the index."""

    executor: Literal["auto", "local", "ray"] = "auto"
    address: str | None = None
    """Ray cluster to join: ``HOST:PORT``, ``ray://HOST:PORT`` or ``auto``; ``None`` joins none."""
    workers: int | None = Field(default=None, ge=1)
    """Parallel workers; ``None`` is one per core that this process may use, or as many as fit the cluster."""
    shard_attempts: int = Field(default=3, ge=1)
    """Workers that a shard may lose, by a crash, a killed node or a lack of memory, before the job fails."""
    shard_timeout_s: float | None = Field(default=None, gt=0)
    """A worker that takes longer over a shard is killed and counts as lost; ``None`` is no limit."""
    shard_passages: int = Field(default=256, ge=1)
    shard_texts: int = Field(default=4096, ge=1)
    overlap: bool = True
    """Whether passages are embedded while a language model extracts, where that takes nothing from it."""

    def limits(self) -> Limits:
        """Return how often a shard may lose its worker, and how long it may take."""
        return Limits(self.shard_attempts, self.shard_timeout_s)


class Config(Section):
    """Everything one run needs."""

    corpus: CorpusConfig = CorpusConfig()
    chunk: ChunkConfig = ChunkConfig()
    extract: ExtractConfig = ExtractConfig()
    embed: EmbedConfig = EmbedConfig()
    synonyms: SynonymsConfig = SynonymsConfig()
    graph: GraphConfig = GraphConfig()
    precompute: PrecomputeConfig = PrecomputeConfig()
    retrieve: RetrieveConfig = RetrieveConfig()
    reader: ReaderConfig = ReaderConfig()
    cluster: ClusterConfig = ClusterConfig()
    max_quarantine_rate: float = Field(default=0.01, ge=0.0, le=1.0)
    """Share of records that may be quarantined before the job fails."""
    output: str | None = None

    def result_part(self) -> dict[str, Any]:
        """Return the settings that decide the bytes of the index, as JSON-ready values."""
        return self.model_dump(
            mode="json",
            exclude={
                "corpus": {"path"},
                "extract": _EXTRACT_EFFORT,
                "embed": _EMBED_EFFORT,
                "synonyms": {"memory_bytes"},
                "graph": {"memory_bytes"},
                "precompute": {"memory_bytes"},
                "reader": True,
                "cluster": True,
                "output": True,
                "max_quarantine_rate": True,
            },
        )


def load_config(
    path: str | Path | None = None,
    overrides: Iterable[str] = (),
    *,
    base: Mapping[str, Any] | None = None,
    **values: Any,
) -> Config:
    """Read a configuration.

    Parameters
    ----------
    path : str or Path, optional
        YAML file; without it the defaults.
    overrides : iterable of str
        ``"section.key=value"`` pairs, applied after the file; the value is read as YAML.
    base : mapping, optional
        Settings to start from, where there is no file.
    **values : Any
        ``section__key=value`` settings applied last; ``None`` values are passed over.

    Returns
    -------
    Config

    Raises
    ------
    UsageError
        If the file is missing or not a mapping, an override has no ``=``, or a key or value is refused.
    """
    tree = _read_yaml(Path(path)) if path is not None else copy.deepcopy(dict(base or {}))
    for override in overrides:
        key, separator, text = override.partition("=")
        if not separator or not key:
            raise UsageError(f"--set {override!r}: expected section.key=value, e.g. synonyms.threshold=0.85")
        _assign(tree, key.split("."), _parse_value(key, text), override)
    for name, value in values.items():
        if value is not None:
            _assign(tree, name.split("__"), value, name)
    try:
        return Config.model_validate(tree)
    except pydantic.ValidationError as error:
        source = str(path) if path is not None else "configuration"
        raise UsageError(f"{source}: " + "; ".join(_explain(e) for e in error.errors())) from error


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"Cannot read the configuration {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is not valid YAML: {error}") from error
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise UsageError(f"{path}: expected a mapping of sections, got {type(tree).__name__}")
    return tree


def _parse_value(key: str, text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise UsageError(f"--set {key}: the value {text!r} is not valid YAML") from error


def _assign(tree: dict[str, Any], keys: list[str], value: Any, source: str) -> None:
    for key in keys[:-1]:
        child = tree.setdefault(key, {})
        if not isinstance(child, dict):
            raise UsageError(f"{source}: {key!r} is not a section")
        tree = child
    tree[keys[-1]] = value


def _explain(error: Mapping[str, Any]) -> str:
    keys = [str(part) for part in error["loc"]]
    name = ".".join(keys) or "configuration"
    if error["type"] == "extra_forbidden":
        close = difflib.get_close_matches(keys[-1], _known_keys(keys[:-1]), n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        return f"unknown key {name}{hint}"
    return f"{name}: {error['msg']} (got {error['input']!r})"


def _known_keys(parents: list[str]) -> list[str]:
    model: type[pydantic.BaseModel] = Config
    for parent in parents:
        annotation = model.model_fields[parent].annotation
        if not (isinstance(annotation, type) and issubclass(annotation, pydantic.BaseModel)):
            return []
        model = annotation
    return list(model.model_fields)
