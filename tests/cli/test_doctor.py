"""`sarathi-tune doctor`: what would compute, and why nothing else would."""

import json

from tests.cli.running import run


def test_every_attention_back_end_is_named_with_what_speaks_against_it() -> None:
    ended = run("doctor", "--device", "cpu", "--json", "-")
    assert ended.code == 0
    engine = json.loads(ended.out)["engine"]
    others = engine["other_attention"]
    assert {engine["attention"], *others} == {"cpu", "sdpa", "triton", "flash", "reference"}
    assert others["flash"] == "it needs a CUDA device and this is cpu"
    assert others["reference"] == f"it can run here, and {engine['attention']} goes before it"


def test_a_person_reads_the_same() -> None:
    ended = run("doctor", "--device", "cpu", "--attention", "sdpa")
    text = " ".join(ended.out.split())
    assert "attention sdpa" in text
    assert "asked for by name" in text
    assert "other attention flash it needs a CUDA device and this is cpu" in text
