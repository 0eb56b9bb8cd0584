"""What can be known to go wrong before any work is done: packages, GPUs, endpoints, keys, prices."""

from __future__ import annotations

from importlib.util import find_spec

import httpx
import structlog

from hippoindex.errors import HippoIndexError, MissingPackageError, UsageError
from hippoindex.pipeline.config import Config
from hippoindex.pipeline.embed import embedder_dimension
from hippoindex.pipeline.extract.llm import llm_fingerprint
from hippoindex.pipeline.llm.endpoint import EndpointSettings, checked_url, read_api_key
from hippoindex.pipeline.llm.known import known_models
from hippoindex.pipeline.llm.vllm import require_memory, require_vllm

log = structlog.get_logger("hippoindex")

_TIMEOUT_S = 10.0


def preflight(config: Config) -> None:
    """Fail in seconds rather than after hours.

    GPUs and packages of vLLM are looked for on this machine, unless the work runs on a cluster at an address.

    Raises
    ------
    HippoIndexError
        Naming what is missing.
    """
    here = config.cluster.address is None
    _check_extract(config, here)
    _check_embed(config, here)


def _check_extract(config: Config, here: bool) -> None:
    extract = config.extract
    if extract.engine not in ("openai", "vllm"):
        return
    llm_fingerprint(extract)
    if extract.max_usd is not None and extract.price_usd is None:
        raise UsageError("A spend limit (extract.max_usd) needs the endpoint's prices: set extract.price_usd")
    if extract.engine == "openai":
        _check_endpoint(
            EndpointSettings("extract", extract.base_url, extract.api_key_env, str(extract.model))
        )
    elif here:
        require_vllm(extract.vllm, "extract.engine=vllm")
        known = known_models().llms.get(str(extract.model))
        if known is not None:
            require_memory(extract.vllm, known.weights_bytes, str(extract.model))


def _check_embed(config: Config, here: bool) -> None:
    embed = config.embed
    if embed.engine == "onnx":
        return
    embedder_dimension(embed)
    known = known_models().encoders.get(embed.model)
    if (
        known is not None
        and known.needs_remote_code
        and not embed.trust_remote_code
        and embed.engine != "openai"
    ):
        raise UsageError(
            f"The embedding model {embed.model!r} comes with code of its own. If you trust its publisher: "
            "--set embed.trust_remote_code=true"
        )
    if embed.engine == "openai":
        _check_endpoint(EndpointSettings("embed", embed.base_url, embed.api_key_env, embed.model))
    elif here and embed.engine == "vllm":
        require_vllm(embed.vllm, "embed.engine=vllm")
    elif here and find_spec("sentence_transformers") is None:
        raise MissingPackageError(
            "sentence_transformers",
            "embed.engine=sentence-transformers",
            "pip install 'hippoindex[sentence-transformers]'",
        )


def _check_endpoint(settings: EndpointSettings) -> None:
    """Ask a server for its models; a server that has no such list is one all the same."""
    url, key = f"{checked_url(settings)}/models", read_api_key(settings)
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        response = httpx.get(url, headers=headers, timeout=_TIMEOUT_S)
    except httpx.HTTPError as error:
        raise HippoIndexError(
            f"No model server can be reached at {settings.base_url}: {error or type(error).__name__}. Check "
            f"that it runs and that {settings.section}.base_url is its address, e.g. http://127.0.0.1:8000/v1."
        ) from error
    if response.status_code == httpx.codes.UNAUTHORIZED:
        raise HippoIndexError(
            f"{settings.base_url} refuses the API key (HTTP 401). Set the environment variable "
            f"{settings.api_key_env} ({settings.section}.api_key_env)."
        )
    names = _names(response)
    if names and settings.model not in names:
        log.warning("the server does not list the model", model=settings.model, listed=names[:10])


def _names(response: httpx.Response) -> list[str]:
    try:
        return [str(item["id"]) for item in response.json()["data"]]
    except (ValueError, LookupError, TypeError):
        return []
