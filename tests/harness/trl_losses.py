"""The losses of TRL (1.16) on given tensors, by the code of its own trainers.

Each trainer is made with a small model and then asked for the loss of a batch; what stands in for the model gives the
log-probabilities of the batch. Each function takes a batch of tensors and a case's settings, and returns TRL's loss and
its gradient with respect to the tensor that training would change, or the advantages.
"""

from __future__ import annotations

import functools
import tempfile
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

Batch = dict[str, Tensor]
Outputs = dict[str, Tensor]

WORDS = 16
DATA = {
    "prompts": {"prompt": ["w3 w4", "w5 w6"] * 8},
    "pairs": {"prompt": ["w3"] * 4, "chosen": [" w4"] * 4, "rejected": [" w5"] * 4},
    "labels": {"prompt": ["w3"] * 4, "completion": [" w4", " w5"] * 2, "label": [True, False] * 2},
}


def tokenizer() -> Any:
    """Of WORDS words; nothing of it reaches a loss."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = ["<pad>", "<eos>", "<unk>"] + [f"w{index}" for index in range(3, WORDS)]
    made = Tokenizer(models.WordLevel({name: index for index, name in enumerate(names)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", padding_side="left"
    )


def small(heads: str = "LlamaForCausalLM", **others: Any) -> Any:
    """A Llama of two layers."""
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=WORDS,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
        **others,
    )
    return getattr(transformers, heads)(config)


@functools.cache
def _trainer(kind: str, data: str, heads: str = "LlamaForCausalLM", **arguments: Any) -> Any:
    import trl
    from datasets import Dataset

    config = getattr(trl, f"{kind}Config")(
        output_dir=tempfile.mkdtemp(), report_to="none", use_cpu=True, bf16=False, **arguments
    )
    others: dict[str, Any] = {}
    if kind in ("GRPO", "RLOO"):
        others["reward_funcs"] = lambda completions, **_: [0.0] * len(completions)
    elif kind in ("DPO", "KTO"):
        others["ref_model"] = small()  # without one TRL reads the model again from its path, and it has none
    return getattr(trl, f"{kind}Trainer")(
        model=small(heads, **({"num_labels": 1} if heads != "LlamaForCausalLM" else {})),
        args=config,
        train_dataset=Dataset.from_dict(DATA[data]),
        processing_class=tokenizer(),
        **others,
    )


def _online(kind: str, batch: Batch, settings: dict[str, Any]) -> Any:
    rows = batch["mask"].shape[0]
    group = settings.get("group", 2)
    trainer = _trainer(kind, "prompts", per_device_train_batch_size=rows, num_generations=group, beta=0.0)
    trainer.current_gradient_accumulation_steps = 1
    trainer.epsilon_low = settings.get("clip_low", 0.2)
    trainer.epsilon_high = settings.get("clip_high", 0.2)
    trainer.beta = settings.get("kl", 0.0)
    return trainer


def _inputs(batch: Batch) -> dict[str, Any]:
    ids = torch.ones_like(batch["mask"], dtype=torch.long)
    return {
        "prompt_ids": ids[:, :1],
        "prompt_mask": ids[:, :1],
        "completion_ids": ids,
        "completion_mask": batch["mask"],
    }


def grpo(batch: Batch, settings: dict[str, Any]) -> Outputs:
    """`GRPOTrainer._compute_loss`; with a `weight_cap` the path that corrects the log-probabilities of vLLM."""
    trainer = _online("GRPO", batch, settings)
    trainer.loss_type = settings["normalization"]
    trainer.max_completion_length = settings.get("max_length")
    trainer.args.steps_per_generation = settings.get("updates", 1)
    trainer.args.use_bias_correction_kl = False
    trainer.args.delta = settings.get("dual_clip")
    trainer.importance_sampling_level = {"token": "token", "sequence_mean": "sequence"}[
        settings.get("ratio", "token")
    ]
    trainer.entropy_coef = settings.get("entropy", 0.0)
    trainer._entropy_bonus_enabled = trainer.entropy_coef != 0
    trainer.use_adaptive_entropy = False
    logprobs = batch["logprobs"].clone().requires_grad_()
    inputs = {
        **_inputs(batch),
        "advantages": batch["advantages"],
        "num_items_in_batch": batch["generated_mask"].sum(),
        "ref_per_token_logps": batch["reference"],
        "old_per_token_logps": batch["behaviour"],
    }
    if "weight_cap" in settings:
        trainer.use_vllm = trainer.vllm_importance_sampling_correction = True
        inputs["old_per_token_logps"] = batch["proximal"]
        gap = (batch["proximal"] - batch["behaviour"]) * batch["mask"]
        inputs["importance_sampling_ratio"] = gap.exp().clamp(max=settings["weight_cap"])
    else:
        trainer.use_vllm = False
    entropy = batch["entropy"].clone().requires_grad_()
    trainer._get_per_token_logps_and_entropies = lambda *_, **__: (logprobs, entropy, None)
    loss = trainer._compute_loss(trainer.model, inputs)
    gradients = torch.autograd.grad(loss, [logprobs, entropy], allow_unused=True)
    found = {"loss": loss.detach(), "gradient": gradients[0]}
    if gradients[1] is not None:
        found["entropy_gradient"] = gradients[1]
    return found


def rloo(batch: Batch, settings: dict[str, Any]) -> Outputs:
    """`RLOOTrainer._compute_loss`."""
    trainer = _online("RLOO", batch, settings)
    logprobs = batch["logprobs"].clone().requires_grad_()
    trainer._get_per_token_logps_and_entropies = lambda *_, **__: (logprobs, batch["entropy"], None)
    old = (batch["behaviour"] * batch["mask"]).sum(1)
    inputs = {**_inputs(batch), "old_logps": old, "advantages": batch["advantages"]}
    loss = trainer._compute_loss(trainer.model, inputs)
    return {"loss": loss.detach(), "gradient": torch.autograd.grad(loss, logprobs)[0]}


def advantages(batch: Batch, settings: dict[str, Any]) -> Outputs:
    """`_generate_and_score_completions` of the GRPO or the RLOO trainer, on given answers and rewards."""
    kind = settings["trainer"]
    rewards = batch["rewards"]
    trainer = _online(kind, batch, {**settings, "group": rewards.shape[1]})
    trainer.num_generations = rewards.shape[1]
    lengths = batch["mask"].sum(1).tolist()
    answers = [[3] * int(length) for length in lengths]
    prompts = [[4, 5]] * len(answers)
    texts = ["w3"] * len(answers)
    if kind == "GRPO":
        trainer.scale_rewards = settings["scale"]
        trainer.use_vllm = False
        made: tuple[Any, ...] = (prompts, answers, None, texts, None, {}, None, None)
    else:
        trainer.normalize_advantages = settings["normalize"]
        trainer.reward_clip_range = None
        trainer.ref_model = "reference"
        made = (prompts, answers, texts)
    trainer._generate = lambda *_: made
    trainer._calculate_rewards = lambda *_: rewards.reshape(-1, 1)
    trainer._get_per_token_logps_and_entropies = lambda model, *_, **__: (
        batch["reference"] if model == "reference" else batch["behaviour"],
        None,
        None,
    )
    found = trainer._generate_and_score_completions([{"prompt": "w4 w5"}] * len(answers))
    return {"advantages": found["advantages"].reshape(rewards.shape)}


def _answers(logprobs: Tensor, mask: Tensor) -> SimpleNamespace:
    """What a model with a fused head returns for answers after one token of a prompt."""
    return SimpleNamespace(
        log_probs=logprobs * mask,
        entropy=torch.zeros_like(logprobs),
        mean_logits=torch.zeros_like(logprobs),
        is_top1=torch.zeros_like(logprobs, dtype=torch.bool),
    )


def _rows(mask: Tensor) -> dict[str, Tensor]:
    whole = torch.cat([torch.zeros_like(mask[:, :1]), mask], dim=1).long()
    ids = torch.ones_like(whole)
    return {"input_ids": ids, "attention_mask": ids, "completion_mask": whole}


def dpo(batch: Batch, settings: dict[str, Any]) -> Outputs:
    """`DPOTrainer._compute_loss`; the first half of the rows is chosen, the second rejected."""
    trainer = _trainer("DPO", "pairs", per_device_train_batch_size=2)
    trainer.beta = settings["beta"]
    trainer.loss_types, trainer.loss_weights = [settings["kind"]], [1.0]
    trainer.label_smoothing = settings.get("label_smoothing", 0.0)
    trainer.ref_model = lambda **_: _answers(batch["reference"], batch["mask"])
    logprobs = batch["logprobs"].clone().requires_grad_()
    loss = trainer._compute_loss(lambda **_: _answers(logprobs, batch["mask"]), _rows(batch["mask"]), False)
    return {"loss": loss.detach(), "gradient": torch.autograd.grad(loss, logprobs)[0]}


def kto(batch: Batch, settings: dict[str, Any]) -> Outputs:
    """`KTOTrainer._compute_loss`; every second answer is desirable, `proximal` stands for the mismatched answers."""
    trainer = _trainer("KTO", "labels", per_device_train_batch_size=2)
    trainer.beta = settings["beta"]
    trainer.desirable_weight = settings["desirable_weight"]
    trainer.undesirable_weight = settings["undesirable_weight"]
    logprobs = batch["logprobs"].clone().requires_grad_()
    calls = {"policy": [batch["proximal"], logprobs], "reference": [batch["behaviour"], batch["reference"]]}

    def model(which: str) -> Any:
        return lambda **_: _answers(calls[which].pop(0), batch["mask"])

    trainer.ref_model = model("reference")
    rows = _rows(batch["mask"])
    mismatched = {f"KL_{name}": value for name, value in rows.items()}
    labels = {"label": torch.arange(len(logprobs)) % 2 == 0}
    loss = trainer._compute_loss(model("policy"), {**rows, **mismatched, **labels}, False)
    return {"loss": loss.detach(), "gradient": torch.autograd.grad(loss, logprobs)[0]}


def reward_model(batch: Batch, settings: dict[str, Any]) -> Outputs:
    """`RewardTrainer.compute_loss`; scores are the advantages, and margins the entropies of the first token."""
    trainer = _trainer("Reward", "pairs", "LlamaForSequenceClassification", per_device_train_batch_size=2)
    trainer.args.center_rewards_coefficient = settings["centering"] or None
    scores = batch["advantages"].clone().requires_grad_()
    inputs = _rows(batch["mask"])
    if settings["margin"]:
        inputs["margin"] = batch["entropy"][: len(scores) // 2, 0]
    loss = trainer.compute_loss(lambda **_: SimpleNamespace(logits=scores[:, None]), inputs)
    return {"loss": loss.detach(), "gradient": torch.autograd.grad(loss, scores)[0]}


FUNCTIONS = {
    "policy": grpo,
    "rloo": rloo,
    "advantages": advantages,
    "dpo": dpo,
    "kto": kto,
    "reward_model": reward_model,
}
