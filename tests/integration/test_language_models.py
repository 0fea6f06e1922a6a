"""GPT-2, LLaMA and LoRA: sizes as published, causality, weights of others, what is learned."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

from perfect.config.schema import OptimizerConfig
from perfect.models import build_language_model
from perfect.models.classification import LanguageTask
from perfect.models.gpt2 import Gpt2, Gpt2Shape
from perfect.models.llama import Llama, LlamaShape
from perfect.models.lora import add_lora
from perfect.models.pretrained import WeightsError, load_pretrained

TINY = ("gpt2_tiny", "llama_tiny")


def parameters(net: nn.Module) -> int:
    return sum(p.numel() for p in net.parameters())


def meta(name: str, vocabulary: int) -> nn.Module:
    with torch.device("meta"):
        return build_language_model(name, vocabulary)


@pytest.mark.parametrize(
    ("name", "vocabulary", "count"),
    [
        ("gpt2_small", 50257, 124_439_808),
        ("gpt2_medium", 50257, 354_823_168),
        ("gpt2_large", 50257, 774_030_080),
        ("gpt2_xl", 50257, 1_557_611_200),
        ("llama_7b", 32000, 6_738_415_616),
    ],
)
def test_a_net_has_the_published_number_of_parameters(
    name: str, vocabulary: int, count: int
) -> None:
    assert parameters(meta(name, vocabulary)) == count


@pytest.mark.parametrize("name", TINY)
def test_a_token_changes_no_logit_before_it(name: str) -> None:
    torch.manual_seed(0)
    net = build_language_model(name, 50).eval()
    ids = torch.randint(0, 50, (1, 12))
    other = ids.clone()
    other[0, 7] = (other[0, 7] + 1) % 50
    with torch.no_grad():
        before, after = net(ids), net(other)
    assert torch.equal(before[:, :7], after[:, :7])
    assert all(not torch.equal(before[:, n], after[:, n]) for n in range(7, 12))


def test_gpt2_reads_and_writes_words_with_one_matrix_and_drops_out_only_in_training() -> None:
    net = build_language_model("gpt2_tiny", 50)
    assert isinstance(net, Gpt2)
    assert net.head.weight is net.words.weight
    ids = torch.randint(0, 50, (1, 12))
    with torch.no_grad():
        assert not torch.equal(net(ids), net(ids))
        net.eval()
        assert torch.equal(net(ids), net(ids))
        certain = build_language_model("gpt2_tiny", 50, dropout=0.0)
        assert torch.equal(certain(ids), certain(ids))


# ---- LoRA ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TINY)
def test_lora_begins_as_the_frozen_net_and_only_its_own_matrices_learn(name: str) -> None:
    torch.manual_seed(0)
    net = build_language_model(name, 50).eval()
    ids = torch.randint(0, 50, (2, 12))
    with torch.no_grad():
        before = net(ids)
        add_lora(net, net.adapted, rank=4, alpha=8.0)
        assert torch.equal(net(ids), before)
    frozen = {n: p.clone() for n, p in net.named_parameters() if not p.requires_grad}
    learned = {n: p.clone() for n, p in net.named_parameters() if p.requires_grad}
    assert {n.rsplit(".", 1)[1] for n in learned} == {"a", "b"}

    optimizer = LanguageTask(net, OptimizerConfig(name="adamw", lr=1e-2)).configure_optimizers()
    assert {id(p) for g in optimizer.param_groups for p in g["params"]} == {
        id(p) for p in net.parameters() if p.requires_grad
    }
    for _ in range(2):  # the first moves B alone, since B is zero
        optimizer.zero_grad()
        functional.cross_entropy(net(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten()).backward()
        optimizer.step()
    now = dict(net.named_parameters())
    assert all(torch.equal(now[n], p) for n, p in frozen.items())
    assert all(not torch.equal(now[n], p) for n, p in learned.items())


# ---- weights of others --------------------------------------------------------------------------


def test_gpt2_gives_the_logits_of_transformers_with_its_weights(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=61, n_positions=32, n_embd=24, n_layer=2, n_head=3,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    theirs = transformers.GPT2LMHeadModel(config).eval()
    for parameter in theirs.parameters():
        parameter.data.add_(0.1 * torch.randn_like(parameter))
    theirs.save_pretrained(tmp_path)
    ours = Gpt2(Gpt2Shape(layers=2, heads=3, width=24, positions=32), 61).eval()
    load_pretrained(ours, tmp_path)
    ids = torch.randint(0, 61, (2, 20))
    with torch.no_grad():
        torch.testing.assert_close(ours(ids), theirs(ids).logits, atol=1e-4, rtol=1e-4)


def test_code_that_lies_beside_the_weights_is_never_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    monkeypatch.setattr("builtins.input", lambda _: "y")  # transformers would ask
    ran = tmp_path / "ran"
    (tmp_path / "own.py").write_text(f"open({str(ran)!r}, 'w')\n")
    auto = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "own", "auto_map": auto}))
    ours = Gpt2(Gpt2Shape(layers=1, heads=1, width=8, positions=8), 9)
    with pytest.raises(WeightsError, match="cannot be read"):
        load_pretrained(ours, tmp_path)
    assert not ran.exists()


def llama_of_others(folder: Path, **changed: object) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    said = {
        "vocab_size": 61, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2,
        "num_attention_heads": 3, "num_key_value_heads": 3, "rms_norm_eps": 1e-3,
        "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None,
    }  # fmt: skip
    theirs = transformers.LlamaForCausalLM(transformers.LlamaConfig(**(said | changed))).eval()
    for parameter in theirs.parameters():
        parameter.data.add_(0.1 * torch.randn_like(parameter))
    theirs.save_pretrained(folder)
    return theirs


SHAPE = LlamaShape(layers=2, heads=3, width=24, inside=40)


def test_llama_gives_the_logits_of_transformers_with_its_weights(tmp_path: Path) -> None:
    theirs = llama_of_others(tmp_path)
    ours = Llama(SHAPE, 61).eval()
    load_pretrained(ours, tmp_path)
    ids = torch.randint(0, 61, (2, 20))
    with torch.no_grad():
        torch.testing.assert_close(ours(ids), theirs(ids).logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"num_hidden_layers": 3}, "it also has blocks.2"),
        ({"vocab_size": 62}, r"words.weight is \[62, 24\] there, \[61, 24\] here"),
        ({"num_attention_heads": 6, "num_key_value_heads": 6}, "heads, rotary base and kind"),
    ],
)
def test_weights_of_another_shape_are_refused(
    changed: dict[str, object], said: str, tmp_path: Path
) -> None:
    llama_of_others(tmp_path, **changed)
    with pytest.raises(WeightsError, match=said):
        load_pretrained(Llama(SHAPE, 61), tmp_path)


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    net = Llama(SHAPE, 61)
    with pytest.raises(WeightsError, match="no folder"):
        load_pretrained(net, tmp_path / "nowhere")
    with pytest.raises(WeightsError, match="cannot be read"):
        load_pretrained(net, tmp_path)
