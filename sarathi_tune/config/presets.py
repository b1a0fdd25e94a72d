"""Well-known architectures by name, so that a model can be timed without its weights, and the one place that turns what
a user wrote after `--model` into a ModelSource.

The numbers are those of the `config.json` that is published with each model (its repository is `hub_id`).
"""

import difflib
import re
from pathlib import Path

from sarathi_tune.config.hf import load_model_config
from sarathi_tune.config.model import ModelConfig, RopeScaling
from sarathi_tune.config.source import ModelSource
from sarathi_tune.errors import ModelError

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")

_ALL = (
    ModelConfig(
        name="smollm2-135m",
        hub_id="HuggingFaceTB/SmolLM2-135M",
        family="llama",
        vocab_size=49_152,
        hidden_size=576,
        intermediate_size=1_536,
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        max_model_len=8_192,
        rope_theta=100_000.0,
        tie_embeddings=True,
        eos_token_ids=(0,),
        bos_token_id=0,
    ),
    ModelConfig(
        name="qwen2.5-0.5b",
        hub_id="Qwen/Qwen2.5-0.5B",
        family="qwen2",
        vocab_size=151_936,
        hidden_size=896,
        intermediate_size=4_864,
        num_layers=24,
        num_heads=14,
        num_kv_heads=2,
        head_dim=64,
        max_model_len=32_768,
        rms_norm_eps=1e-6,
        rope_theta=1_000_000.0,
        tie_embeddings=True,
        attention_bias=True,
        eos_token_ids=(151_643,),
        bos_token_id=151_643,
    ),
    ModelConfig(
        name="llama-3.2-1b",
        hub_id="meta-llama/Llama-3.2-1B",
        family="llama",
        vocab_size=128_256,
        hidden_size=2_048,
        intermediate_size=8_192,
        num_layers=16,
        num_heads=32,
        num_kv_heads=8,
        head_dim=64,
        max_model_len=131_072,
        rope_theta=500_000.0,
        rope_scaling=RopeScaling("llama3", factor=32.0),
        tie_embeddings=True,
        eos_token_ids=(128_001,),
        bos_token_id=128_000,
    ),
    ModelConfig(
        name="mistral-7b",
        hub_id="mistralai/Mistral-7B-v0.3",
        family="mistral",
        vocab_size=32_768,
        hidden_size=4_096,
        intermediate_size=14_336,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        max_model_len=32_768,
        rope_theta=1_000_000.0,
        eos_token_ids=(2,),
        bos_token_id=1,
    ),
    ModelConfig(
        name="qwen2.5-7b",
        hub_id="Qwen/Qwen2.5-7B",
        family="qwen2",
        vocab_size=152_064,
        hidden_size=3_584,
        intermediate_size=18_944,
        num_layers=28,
        num_heads=28,
        num_kv_heads=4,
        head_dim=128,
        max_model_len=131_072,
        rms_norm_eps=1e-6,
        rope_theta=1_000_000.0,
        attention_bias=True,
        eos_token_ids=(151_643,),
        bos_token_id=151_643,
    ),
    ModelConfig(
        name="llama-3-8b",
        hub_id="meta-llama/Meta-Llama-3-8B",
        family="llama",
        vocab_size=128_256,
        hidden_size=4_096,
        intermediate_size=14_336,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        max_model_len=8_192,
        rope_theta=500_000.0,
        eos_token_ids=(128_001,),
        bos_token_id=128_000,
    ),
    ModelConfig(
        name="llama-3.1-8b",
        hub_id="meta-llama/Llama-3.1-8B",
        family="llama",
        vocab_size=128_256,
        hidden_size=4_096,
        intermediate_size=14_336,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        max_model_len=131_072,
        rope_theta=500_000.0,
        rope_scaling=RopeScaling("llama3", factor=8.0),
        eos_token_ids=(128_001,),
        bos_token_id=128_000,
    ),
    ModelConfig(
        name="qwen3-8b",
        hub_id="Qwen/Qwen3-8B",
        family="qwen3",
        vocab_size=151_936,
        hidden_size=4_096,
        intermediate_size=12_288,
        num_layers=36,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        max_model_len=40_960,
        rms_norm_eps=1e-6,
        rope_theta=1_000_000.0,
        qk_norm=True,
        eos_token_ids=(151_645,),
        bos_token_id=151_643,
    ),
    ModelConfig(
        name="yi-34b",
        hub_id="01-ai/Yi-34B",
        family="llama",
        vocab_size=64_000,
        hidden_size=7_168,
        intermediate_size=20_480,
        num_layers=60,
        num_heads=56,
        num_kv_heads=8,
        head_dim=128,
        max_model_len=4_096,
        rope_theta=5_000_000.0,
        eos_token_ids=(2,),
        bos_token_id=1,
    ),
    ModelConfig(
        name="llama-3-70b",
        hub_id="meta-llama/Meta-Llama-3-70B",
        family="llama",
        vocab_size=128_256,
        hidden_size=8_192,
        intermediate_size=28_672,
        num_layers=80,
        num_heads=64,
        num_kv_heads=8,
        head_dim=128,
        max_model_len=8_192,
        rope_theta=500_000.0,
        eos_token_ids=(128_001,),
        bos_token_id=128_000,
    ),
)

#: Presets by name, smallest first.
PRESETS: dict[str, ModelConfig] = {preset.name: preset for preset in _ALL}


def resolve_model(name_or_dir: str) -> ModelSource:
    """A preset (random weights) or a local model directory (its weights).

    A preset's name wins over a directory of the same name in the current directory; `./name` means the directory.
    Raises ModelError for anything else, saying what can be given; nothing is ever downloaded.
    """
    name = name_or_dir.strip()
    if name.lower() in PRESETS:
        return ModelSource(PRESETS[name.lower()])
    directory = Path(name).expanduser()
    if name and (_exists(directory) or name.startswith((".", "/", "~"))):
        return ModelSource(load_model_config(directory), directory)
    raise ModelError(_unknown(name))


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # a name too long for the file system is no path
        return False


def _unknown(name: str) -> str:
    guesses = difflib.get_close_matches(name.rsplit("/", 1)[-1].lower(), PRESETS, n=1, cutoff=0.6)
    hint = f" Did you mean {guesses[0]}?" if guesses else ""
    if _HUB_NAME.fullmatch(name):
        what = f"There is no directory {name!r}, and nothing is downloaded from a model hub."
    else:
        what = f"Unknown model {name if len(name) <= 80 else name[:77] + '...'!r}."
    return f"{what}{hint} Give one of the presets {', '.join(PRESETS)}, or a local model directory with config.json."
