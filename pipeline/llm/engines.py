"""Opening the engine that a configuration asks for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from hippoindex.pipeline.config import EngineConfig, ExtractConfig, ReaderConfig
from hippoindex.pipeline.llm.base import ChatEngine, Price
from hippoindex.pipeline.llm.cache import ResponseCache
from hippoindex.pipeline.llm.endpoint import EndpointSettings
from hippoindex.pipeline.llm.openai import OpenAIEngine


async def open_engine(config: ExtractConfig | ReaderConfig, workers: int = 1) -> ChatEngine:
    """Open an engine in one of several workers.

    Parameters
    ----------
    config : ExtractConfig or ReaderConfig
    workers : int
        Each has an equal share of the requests at once and a second, the tokens a second and the US dollars
        that the configuration allows; they do not speak with each other.

    Returns
    -------
    ChatEngine

    Raises
    ------
    HippoIndexError
        If the engine cannot be opened as configured.
    """
    cache = None if config.cache is None else ResponseCache(Path(config.cache), config.section)
    if config.engine == "vllm":
        from hippoindex.pipeline.llm.vllm import open_vllm

        engine = await open_vllm(str(config.model), config.vllm, config.section)
        engine.cache = cache
        return engine
    settings = replace(
        endpoint_settings(config),
        concurrency=max(1, config.concurrency // workers),
        timeout_s=config.timeout_s,
        attempts=config.request_attempts,
        patience_s=config.patience_s,
        requests_per_s=_share(config.requests_per_s, workers),
        tokens_per_s=_share(config.tokens_per_s, workers),
    )
    return OpenAIEngine(
        settings,
        structured=config.structured,
        cache=cache,
        price=price_of(config),
        max_usd=_share(config.max_usd, workers),
    )


def endpoint_settings(config: EngineConfig) -> EndpointSettings:
    """Return where a language model is asked, by name of the section for messages."""
    return EndpointSettings(config.section, config.base_url, config.api_key_env, str(config.model))


def price_of(config: EngineConfig) -> Price | None:
    """Return the price that a configuration gives."""
    return None if config.price_usd is None else Price(**config.price_usd.model_dump())


def _share(whole: float | None, workers: int) -> float | None:
    return None if whole is None else whole / workers
