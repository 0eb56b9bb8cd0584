"""What can be known to go wrong before any work is done: packages, GPUs, endpoints, keys, prices."""

from __future__ import annotations

from importlib.util import find_spec

import httpx
import structlog

from hippoindex.errors import HippoIndexError, MissingPackageError, UsageError
from hippoindex.pipeline.config import Config, ExtractConfig, ReaderConfig
from hippoindex.pipeline.embed import embedder_dimension
from hippoindex.pipeline.extract.llm import llm_fingerprint
from hippoindex.pipeline.llm.endpoint import EndpointSettings, checked_url, read_api_key
from hippoindex.pipeline.llm.engines import endpoint_settings
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
    if config.extract.engine in ("openai", "vllm"):
        llm_fingerprint(config.extract)
        check_language_model(config.extract, here=here)


def check_language_model(config: ExtractConfig | ReaderConfig, *, here: bool = True) -> None:
    """Make sure that a language model is named, and that its server, or vLLM and its GPUs, are there.

    Parameters
    ----------
    config : ExtractConfig or ReaderConfig
    here : bool
        Whether vLLM is to run on this machine.

    Raises
    ------
    HippoIndexError
        Naming what is missing.
    """
    section = config.section
    if not config.model:
        raise UsageError(
            f"{section}.engine={config.engine} needs the name of the model that is to be asked: "
            f"--set {section}.model=NAME"
        )
    if config.engine == "vllm" and (config.max_usd is not None or config.price_usd is not None):
        raise UsageError(
            f"{section}.max_usd and {section}.price_usd are for endpoints, which are paid by the token. With "
            f"{section}.engine=vllm US dollars are GPU hours: set {section}.vllm.gpu_hour_usd"
        )
    if config.max_usd is not None and config.price_usd is None:
        raise UsageError(
            f"A spend limit ({section}.max_usd) needs the endpoint's prices: set {section}.price_usd"
        )
    if config.engine == "openai":
        _check_endpoint(endpoint_settings(config))
    elif here:
        require_vllm(config.vllm, f"{section}.engine=vllm")
        known = known_models().llms.get(config.model)
        if known is not None:
            require_memory(config.vllm, known.weights_bytes, config.model)


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
