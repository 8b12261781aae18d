"""Serves a few prompts with vLLM and writes what it answered, as JSON: run by check.py.

Everything happens at once: prompts longer than a step takes (chunked prefill), prompts that begin
alike (prefix caching), and a cache too small for all of them (preemption). What really happened is
in the answer.
"""

from __future__ import annotations

import argparse
import json
import os
import random
from pathlib import Path

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # one process, so that calls can be counted

PAGE = 32  # the smallest that vLLM's own attention has
BLOCKS = 20  # of PAGE tokens, in the cache
STEP = 48  # tokens that a step takes
NEW = 48  # tokens that each request asks for


def prompts() -> list[list[int]]:
    """Shorter than a page, longer than a step; every other one with the same beginning."""
    draw = random.Random(7)
    beginning = [draw.randrange(2, 256) for _ in range(2 * PAGE)]
    lengths = (1, 3, 31, 32, 33, 40, 97, 130)
    alone = [[draw.randrange(2, 256) for _ in range(n)] for n in lengths]
    shared = [beginning + [draw.randrange(2, 256) for _ in range(n)] for n in lengths]
    return [prompt for pair in zip(alone, shared, strict=True) for prompt in pair]


def instrument(break_it: str) -> list[int]:
    """Counts the calls of our attention; breaks it on purpose if asked to."""
    from flashmoe_science import vllm as ours

    attend, queries = ours.flash_attention_paged, []

    def call(q, *args, cu_seqlens_q, out, **options):
        queries.append(cu_seqlens_q.diff().tolist())
        result = attend(q, *args, cu_seqlens_q=cu_seqlens_q, out=out, **options)
        if break_it:  # of every other head in Gemma, which normalises the sum of all heads
            out[:, :: 2 if "gemma" in break_it else 1].mul_(0.9)
        return result

    ours.flash_attention_paged = call
    return queries


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("answer", type=Path)
    parser.add_argument("--attention", choices=("theirs", "ours", "broken"))
    args = parser.parse_args()
    os.environ["FLASHMOE_VLLM_CPU"] = "0" if args.attention == "theirs" else "1"

    import vllm

    queries = []
    if args.attention != "theirs":
        queries = instrument(args.model.name if args.attention == "broken" else "")
    engine = vllm.LLM(
        str(args.model),
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        max_model_len=256,
        block_size=PAGE,
        num_gpu_blocks_override=BLOCKS,
        max_num_batched_tokens=STEP,
        max_num_seqs=8,
        enable_chunked_prefill=True,
        enable_prefix_caching=True,
        disable_log_stats=False,
        seed=0,
    )
    greedy = vllm.SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True, detokenize=False)
    given = [{"prompt_token_ids": tokens} for tokens in prompts()]
    answers = engine.generate(given, greedy, use_tqdm=False)
    metrics = {metric.name: getattr(metric, "value", None) for metric in engine.get_metrics()}
    answer = {
        "tokens": [list(a.outputs[0].token_ids) for a in answers],
        "cached": sum(a.num_cached_tokens or 0 for a in answers),
        "preempted": int(metrics.get("vllm:num_preemptions", 0)),
        "calls": len(queries),
        "mixed": sum(1 in step and max(step) > 1 for step in queries),
        "version": vllm.__version__,
    }
    args.answer.write_text(json.dumps(answer))


if __name__ == "__main__":
    main()
