"""SmolLM2-135M-Instruct as a folder that vLLM loads: the GGUF of the package, made safetensors once."""

from __future__ import annotations

from pathlib import Path

from hippoindex.pipeline.models import cache_folder, fetch_models


def folder() -> Path:
    """Return the folder; making it takes about a minute."""
    target = cache_folder() / "SmolLM2-135M-Instruct-bfloat16"
    if (target / "model.safetensors").is_file():
        return target
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    (model,) = fetch_models(["SmolLM2-135M-Instruct"])
    (file,) = model.path.glob("*.gguf")
    AutoTokenizer.from_pretrained(model.path, gguf_file=file.name).save_pretrained(target)
    weights = AutoModelForCausalLM.from_pretrained(
        model.path,
        gguf_file=file.name,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
    )
    weights.save_pretrained(target)
    return target
