"""vLLM's own step times, for `against_vllm.py`, which runs this file with the Python that has vLLM.

Usage: python vllm_step_times.py MODEL_DIRECTORY THREADS REPEATS SHAPES, with shapes as JSON rows of
[decodes, context, chunk]. Steps run in this process, one engine step at a time, without the prefix cache, from
token ids and without detokenising: nothing but scheduling, the model and sampling is timed. The last line of stdout is
JSON: milliseconds of every repeat, a row per shape.
"""

import json
import os
import random
import sys
import time

DIRECTORY, THREADS, REPEATS = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
SHAPES = [tuple(row) for row in json.loads(sys.argv[4])]

os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_CPU_KVCACHE_SPACE": "4",
    "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "0" if THREADS == 1 else f"0-{THREADS - 1}",
}

from vllm import LLM, SamplingParams  # noqa: E402  (reads the environment above)
from vllm.inputs import TokensPrompt  # noqa: E402

BUDGET, WARM_UP = 2048, 3


class Steps:
    """One engine, timed a step at a time."""

    def __init__(self) -> None:
        self.engine = LLM(
            model=DIRECTORY,
            dtype="bfloat16",
            max_model_len=8192,
            max_num_batched_tokens=BUDGET,
            max_num_seqs=64,
            enable_prefix_caching=False,
            skip_tokenizer_init=True,
        ).llm_engine
        self.random = random.Random(0)
        self.number = 0

    def add(self, prompt_tokens: int, output_tokens: int) -> None:
        self.number += 1
        prompt = TokensPrompt(prompt_token_ids=[self.random.randint(10, 40_000) for _ in range(prompt_tokens)])
        limits = SamplingParams(max_tokens=output_tokens, temperature=0.0, ignore_eos=True, detokenize=False)
        self.engine.add_request(str(self.number), prompt, limits)

    def step_ms(self) -> float:
        started_s = time.perf_counter()
        self.engine.step()
        return 1000.0 * (time.perf_counter() - started_s)

    def time(self, decodes: int, context: int, chunk: int) -> list[float]:
        """Decodes grow by a token per step: they start below `context` and end as far above it."""
        steps = (WARM_UP + REPEATS) * (1 if chunk == 0 else 2)
        for _ in range(decodes):
            self.add(max(1, context - steps // 2), steps + 4 * decodes + 64)
        for _ in range(decodes * context // BUDGET + decodes + 2 if decodes else 0):
            self.engine.step()
        times = []
        for _ in range(WARM_UP + REPEATS):
            if chunk:
                self.add(chunk, 1)
            times.append(self.step_ms())
            if chunk and decodes:
                self.engine.step()
        while self.engine.has_unfinished_requests():
            self.engine.step()
        return times[WARM_UP:]


def main() -> None:
    steps = Steps()
    print(json.dumps([steps.time(*shape) for shape in SHAPES]))


if __name__ == "__main__":
    main()
