"""A real language model behind an OpenAI-compatible server: prints its address, ends with standard input.

Run as ``python llm_server.py MODEL.gguf CONTEXT_TOKENS SLOTS``.
"""

from __future__ import annotations

import sys

import xllamacpp


def serve(model: str, context_tokens: int, slots: int) -> None:
    """Serve a GGUF file on loopback; each slot has its share of the context."""
    params = xllamacpp.CommonParams()
    params.model.path = model
    params.n_ctx = context_tokens * slots
    params.n_parallel = slots
    params.kv_unified = False
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    params.hostnames = ["127.0.0.1"]
    params.port = 0
    server = xllamacpp.Server(params)
    sys.stdout.write(f"{server.listening_address}\n")
    sys.stdout.flush()
    sys.stdin.read()


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
