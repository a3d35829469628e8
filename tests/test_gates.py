"""Gate gradients against an oracle that reads the residual stream alone, and gates that leave no trace."""

from __future__ import annotations

import re
from contextlib import contextmanager

import accelerate
import pytest
import torch

import popvlm
from models import FAMILIES, LAYERS, VISUAL, build, prompt, text_model
from popvlm.gates import virtual_gates

PARTS = [3, (2, 3), 5, (4, 2), 4]
SHORT = ("qwen3_vl", "gemma3", "llama")


def parts_for(family):
    return PARTS if family in VISUAL else [15]


@contextmanager
def float64():
    """Where a model works in float32 whatever its own precision (norms, rotary, softmax), float64 in place of it."""
    def widened(function):
        def wide(*args, **kwargs):
            args = [torch.float64 if value is torch.float32 else value for value in args]
            return function(*args, **{name: torch.float64 if value is torch.float32 else value
                                      for name, value in kwargs.items()})
        return wide

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "to", widened(torch.Tensor.to))
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        patch.setattr(torch.nn.functional, "softmax", widened(torch.nn.functional.softmax))
        yield


def double(family):
    """A model in float64, and its experts by a loop: the grouped kernel has no such product."""
    model = build(family).double()
    model.config.get_text_config()._experts_implementation = "eager"
    return model


@contextmanager
def scaled_branches(model, factors):
    """Scales what each layer adds to the residual stream, found from the stream alone: after - before.

    `factors` is `[L, 2, B, T]`. The state between the branches is changed in place, so that both the norm that reads
    it and the residual path get it.
    """
    handles = []
    for index, layer in enumerate(text_model(model).layers):
        state = {}

        def enter(module, args, state=state):
            state["before"] = args[0]

        def middle(module, args, state=state, index=index):
            added = args[0] - state["before"]
            args[0].copy_(state["before"] + factors[index, 0][..., None] * added)
            state["between"] = args[0].clone()

        def leave(module, args, output, state=state, index=index):
            states = output[0] if isinstance(output, tuple) else output
            states = state["between"] + factors[index, 1][..., None] * (states - state["between"])
            return (states, *output[1:]) if isinstance(output, tuple) else states

        norm = getattr(layer, "pre_feedforward_layernorm", layer.post_attention_layernorm)
        handles += [layer.register_forward_pre_hook(enter), norm.register_forward_pre_hook(middle),
                    layer.register_forward_hook(leave)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def a_loss(model, batch):
    """Some function of the last three positions' logits."""
    logits = model(**batch, use_cache=False).logits[:, -3:]
    return -logits.log_softmax(-1)[..., 7].sum()


def gate_gradients(model, batch):
    with virtual_gates(model, *batch["input_ids"].shape) as gates:
        return torch.autograd.grad(a_loss(model, batch), gates)[0]


def plain_gradients(model, batch):
    """The same by plain autograd, without checkpointing."""
    shape = LAYERS, 2, *batch["input_ids"].shape
    factors = torch.ones(shape, dtype=next(model.parameters()).dtype, requires_grad=True)
    with torch.enable_grad(), scaled_branches(model, factors):
        return torch.autograd.grad(a_loss(model, batch), factors)[0]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_gate_of_a_batch_equals_plain_autograd(family, attention):
    model = double(family)
    model.set_attn_implementation(attention)
    batch = prompt(model, [parts_for(family), [9]])
    with float64():
        got, want = gate_gradients(model, batch), plain_gradients(model, batch)
    assert want.abs().max() > 1e-2
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("family", FAMILIES)
def test_gates_of_one_change_nothing_and_leave_no_trace(family):
    model = build(family)
    batch = prompt(model, [parts_for(family)])
    frozen = [name for name, _ in model.named_parameters()][::2]
    for name, weight in model.named_parameters():
        weight.requires_grad_(name not in frozen)
    want = model(**batch).logits
    before = {name: {key: dict(value) if isinstance(value, dict) else value for key, value in module.__dict__.items()}
              for name, module in model.named_modules()}
    with pytest.raises(KeyError), virtual_gates(model, *batch["input_ids"].shape) as gates:
        assert gates.shape == (LAYERS, 2, *batch["input_ids"].shape)
        assert torch.equal(model(**batch, use_cache=False).logits, want)
        assert torch.is_grad_enabled()
        raise KeyError
    assert not torch.is_grad_enabled()
    assert frozen == [name for name, weight in model.named_parameters() if not weight.requires_grad]
    for name, module in model.named_modules():
        assert module.__dict__.keys() == before[name].keys(), name
        for key, value in before[name].items():
            if key != "rope_deltas":  # Qwen's, of its last call
                now = module.__dict__[key]
                assert now == value if isinstance(value, dict) else now is value, (name, key)


@pytest.mark.parametrize("family", SHORT)
def test_a_gate_does_what_it_says(family):
    """A gate of 0.5 halves the branch: not only the gradient at one is right."""
    model = double(family)
    batch = prompt(model, [parts_for(family)])
    shape = batch["input_ids"].shape
    factors = torch.rand(LAYERS, 2, *shape, dtype=torch.float64)
    with scaled_branches(model, factors):
        want = a_loss(model, batch)
    with virtual_gates(model, *shape) as gates:
        with torch.no_grad():
            gates.copy_(factors)
        torch.testing.assert_close(a_loss(model, batch), want)


@pytest.mark.parametrize("family", SHORT)
def test_memory_holds_little_more_than_a_state_a_layer(family):
    model = build(family)
    batch = prompt(model, [parts_for(family) + [200]])

    def kept(gradients):
        """How many numbers autograd keeps for the backward pass, by storage."""
        storages = {}

        def pack(tensor):
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            gradients(model, batch)
        return sum(storages.values())

    # The inputs of the layers are held by the checkpoints, beside this.
    assert kept(gate_gradients) < kept(plain_gradients) / 5


@pytest.mark.parametrize("family", SHORT)
@pytest.mark.parametrize("where", ["cpu", "disk", "spread"])
def test_offloaded(family, where, tmp_path):
    model = build(family)
    batch = prompt(model, [parts_for(family)])
    want = gate_gradients(model, batch)
    part = model if family == "llama" else text_model(model)
    if where == "spread":  # a hook on each layer, as `device_map` puts it
        names = {re.sub(r"(layers\.\d+)\..*|\.\w+$", r"\1", name) for name, _ in part.named_parameters()}
        places = {name: "disk" if name.endswith(("1", "4")) else "cpu" for name in names}
        accelerate.dispatch_model(part, places, main_device="cpu", offload_dir=tmp_path)
        assert all("_old_forward" in layer.__dict__ for layer in text_model(model).layers)
    elif where == "disk":
        accelerate.disk_offload(part, tmp_path, execution_device=torch.device("cpu"))
    else:
        accelerate.cpu_offload(part, execution_device=torch.device("cpu"))
    before = [dict(layer.__dict__) for layer in text_model(model).layers]
    torch.testing.assert_close(gate_gradients(model, batch), want)
    assert [layer.__dict__ for layer in text_model(model).layers] == before
    assert all(weight.requires_grad for weight in text_model(model).parameters())


@pytest.mark.parametrize("family", ["gemma3", "llama"])
def test_int8_weights_pass_the_gradient(family):
    """Of torchao and of quanto: the gradients of the model that has the same rounded weights."""
    torchao = pytest.importorskip("torchao.quantization")
    quanto = pytest.importorskip("optimum.quanto")
    for by in "torchao", "quanto":
        model, rounded = build(family), build(family)
        batch = prompt(model, [parts_for(family)])
        layers = text_model(model).layers
        if by == "torchao":
            torchao.quantize_(layers, torchao.Int8WeightOnlyConfig())
        else:
            quanto.quantize(layers, weights=quanto.qint8)
            quanto.freeze(layers)
        for name, module in layers.named_modules():
            if getattr(module, "weight", None) is not None and module.weight.ndim == 2:
                weight = module.weight.dequantize()
                text_model(rounded).layers.get_submodule(name).weight.copy_(weight)
        want = gate_gradients(rounded, batch)
        assert (want - gate_gradients(build(family), batch)).abs().max() > 1e-3, "nothing was rounded"
        torch.testing.assert_close(gate_gradients(model, batch), want, rtol=1e-3, atol=1e-3)


def test_weights_that_pass_no_gradient_are_refused():
    torchao = pytest.importorskip("torchao.quantization")
    model = build("llama")
    torchao.quantize_(model.model.layers[3].mlp, torchao.Int8DynamicActivationInt8WeightConfig())
    with pytest.raises(popvlm.UnsupportedModel, match="mlp of layer 3 passes no gradient"):
        gate_gradients(model, prompt(model, [[9]]))


@pytest.mark.parametrize(("family", "dtype"), [*((family, torch.bfloat16) for family in FAMILIES),
                                               ("llama", torch.float16)], ids=str)
def test_half_precision_is_near(family, dtype):
    model = build(family)
    batch = prompt(model, [parts_for(family)])
    want = gate_gradients(model, batch)
    got = gate_gradients(model.to(dtype), batch)
    assert got.dtype == torch.float32
    if "moe" in family:  # another rounding, other experts
        assert torch.corrcoef(torch.stack([got.flatten(), want.flatten()]))[0, 1] > 0.6
    else:
        assert (got - want).norm() < 0.1 * want.norm()


@pytest.mark.parametrize("family", SHORT)
def test_lora(family):
    peft = pytest.importorskip("peft")
    model = build(family)
    batch = prompt(model, [parts_for(family)])
    plain = gate_gradients(model, batch)
    torch.manual_seed(1)
    wrapped = peft.get_peft_model(model, peft.LoraConfig(
        target_modules=r".*layers.*(q_proj|v_proj|down_proj)", init_lora_weights=False)).eval()
    trained = [name for name, weight in wrapped.named_parameters() if weight.requires_grad]
    got = gate_gradients(wrapped, batch)
    assert trained == [name for name, weight in wrapped.named_parameters() if weight.requires_grad]
    want = gate_gradients(wrapped.merge_and_unload(), batch)
    assert (want - plain).abs().max() > 1e-2
    torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_compiled_layers():
    model = build("llama")
    model.model.layers = model.model.layers[:1]
    batch = prompt(model, [[15]])
    want = gate_gradients(model, batch)
    model.model.layers[0].compile(backend="eager")
    with torch.enable_grad():
        logits = model(**batch, use_cache=False).logits
    assert torch.equal(gate_gradients(model, batch), want)
    assert torch.equal(gate_gradients(torch.compile(model, backend="eager"), batch), want)
    assert torch.equal(model(**batch, use_cache=False).logits, logits)


def test_inside_inference_mode():
    model = build("llama")
    with torch.inference_mode():
        got = gate_gradients(model, prompt(model, [[15]]))
    assert torch.equal(got, gate_gradients(model, prompt(model, [[15]])))


def test_wrong_use_is_told():
    model = build("llama")
    batch = prompt(model, [[9]])
    with virtual_gates(model, 1, 10), pytest.raises(ValueError, match=r"\[1, 10\] .* \[1, 1\]"):
        model(input_ids=torch.ones(1, 1, dtype=torch.long))
    with pytest.raises(popvlm.UnsupportedModel, match="not know Linear"), virtual_gates(torch.nn.Linear(2, 2), 1, 1):
        pass
    assert torch.isfinite(gate_gradients(model, batch)).all()
