"""Train the embedded demo model from scratch on the standard library's text: about an hour on 2 CPU cores.

    python -m tools.demo_model.train --out ppd_runtime/models/demo --work build/demo-training

The loss is next-token cross-entropy at full depth, plus early-exit losses at one random layer below and one at or
above half depth, each the divergence from full depth's own distribution through the shared norm and head. The first
phase lets them move the layers up to the exit only. The second, short phase lets them move full depth as well: the
later layers unlearn what half depth cannot predict, which costs next to nothing on held-out text and is what makes
sampled tokens as easy to predict as greedy ones. Stopping at any time and starting again with the same `--work`
folder continues from the last checkpoint.
"""

import argparse
import json
import logging
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from ppd_runtime.sampling.params import SamplingParams
from ppd_runtime.sampling.sampler import Sampler
from ppd_runtime.training.checkpoint import Checkpoint
from ppd_runtime.training.corpus import Document, corpus_hash, read_standard_library
from ppd_runtime.tune.measured_on import versions

logger = logging.getLogger(__name__)
END_OF_TEXT = "<|endoftext|>"


@dataclass(frozen=True)
class DemoRecipe:
    """Everything that decides the weights, apart from the corpus and the machine's rounding."""

    vocab_size: int = 2048
    hidden_size: int = 256
    intermediate_size: int = 768
    num_layers: int = 12
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    max_position_embeddings: int = 2048
    seed: int = 0
    num_steps: int = 2200
    warmup_steps: int = 60
    agreement_steps: int = 300  # the second phase's
    agreement_warmup_steps: int = 20
    agreement_learning_rate_factor: float = 0.3
    tokens_per_step: int = 4096
    context_length: int = 512
    long_context_length: int = 2048
    long_context_share: float = 0.12  # of each phase's steps, at its end
    muon_learning_rate: float = 0.005
    adam_learning_rate: float = 0.005
    weight_decay: float = 0.1
    shallow_exit_weight: float = 0.1
    deep_exit_weight: float = 0.3
    agreement_deep_exit_weight: float = 1.0

    @property
    def total_steps(self) -> int:
        """Steps of both phases."""
        return self.num_steps + self.agreement_steps

    def agrees(self, step: int) -> bool:
        """Whether a step is of the second phase, in which the exit losses move full depth too."""
        return step >= self.num_steps

    def progress(self, step: int) -> float:
        """How much of its phase lies behind a step, in [0, 1)."""
        return (step - self.num_steps) / self.agreement_steps if self.agrees(step) else step / self.num_steps

    def context_at(self, step: int) -> int:
        """Tokens in a row at a step: short rows first, then a stretch of long ones."""
        long = self.progress(step) >= 1 - self.long_context_share
        return self.long_context_length if long else self.context_length

    def learning_rate_factor(self, step: int) -> float:
        """Linear warm-up, then linear decay to zero, in each phase."""
        decay = 1 - self.progress(step)
        if self.agrees(step):
            warmup = (step - self.num_steps + 1) / self.agreement_warmup_steps
            return self.agreement_learning_rate_factor * min(warmup, decay)
        return min((step + 1) / self.warmup_steps, decay)

    def loss_weights(self, step: int) -> Tensor:
        """Of full depth's loss, the shallow exit's and the deep one's: `[3]`."""
        deep = self.agreement_deep_exit_weight if self.agrees(step) else self.deep_exit_weight
        return torch.tensor([1.0, self.shallow_exit_weight, deep])


def train_tokenizer(documents: list[Document], vocab_size: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE over the training documents; `<|endoftext|>` separates documents and ends a text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((document.text for document in documents), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END_OF_TEXT, clean_up_tokenization_spaces=False
    )


def encode(tokenizer: PreTrainedTokenizerFast, documents: list[Document]) -> Tensor:
    """All documents as one row of token ids, each ended by `<|endoftext|>`."""
    rows = tokenizer([document.text for document in documents], verbose=False).input_ids
    return torch.tensor([token for row in rows for token in [*row, tokenizer.eos_token_id]])


def build_model(recipe: DemoRecipe, eos_token_id: int) -> LlamaForCausalLM:
    """A Llama with tied embeddings and freshly drawn weights."""
    torch.manual_seed(recipe.seed)
    config = LlamaConfig(
        vocab_size=recipe.vocab_size,
        hidden_size=recipe.hidden_size,
        intermediate_size=recipe.intermediate_size,
        num_hidden_layers=recipe.num_layers,
        num_attention_heads=recipe.num_attention_heads,
        num_key_value_heads=recipe.num_key_value_heads,
        max_position_embeddings=recipe.max_position_embeddings,
        tie_word_embeddings=True,
        bos_token_id=eos_token_id,
        eos_token_id=eos_token_id,
    )
    return LlamaForCausalLM(config)


class EarlyExitLoss(nn.Module):
    """Next-token loss at full depth and exit losses at two chosen layers, `[3]` values in that order."""

    def __init__(self, model: LlamaForCausalLM) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, exit_layers: Tensor, agree: bool) -> Tensor:
        """`input_ids` is `[batch, length + 1]`; `exit_layers` holds two numbers in 1..d-1.

        With `agree` the exit losses' gradients reach full depth as well.
        """
        hidden_states = self.model.model(input_ids[:, :-1], output_hidden_states=True, use_cache=False).hidden_states
        exits = self.model.model.norm(torch.stack(hidden_states[1:-1]).index_select(0, exit_layers - 1))
        log_probs = F.log_softmax(self.model.lm_head(hidden_states[-1]).float(), dim=-1)
        labels = input_ids[:, 1:]
        final_loss = -log_probs.gather(-1, labels[..., None]).mean()
        exit_log_probs = F.log_softmax(self.model.lm_head(exits).float(), dim=-1)
        target = log_probs if agree else log_probs.detach()
        exit_losses = (target.exp() * (target - exit_log_probs)).sum(-1).mean((1, 2))
        return torch.cat([final_loss[None], exit_losses])


def build_optimizers(model: nn.Module, recipe: DemoRecipe) -> list[torch.optim.Optimizer]:
    """Muon for the layers' matrices, AdamW for the embedding and the norms."""
    named = list(model.named_parameters())
    matrices = [p for name, p in named if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in named if p.ndim != 2 or "embed" in name]
    return [
        torch.optim.Muon(
            matrices,
            lr=recipe.muon_learning_rate,
            weight_decay=recipe.weight_decay,
            adjust_lr_fn="match_rms_adamw",
        ),
        torch.optim.AdamW(others, lr=recipe.adam_learning_rate, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def draw_batch(tokens: Tensor, recipe: DemoRecipe, step: int) -> tuple[Tensor, Tensor]:
    """The rows `[batch, length + 1]` and the two exit layers of a step: a function of (seed, step) alone."""
    generator = np.random.default_rng((recipe.seed, step))
    length = recipe.context_at(step)
    starts = generator.integers(0, tokens.numel() - length - 1, recipe.tokens_per_step // length)
    half = recipe.num_layers // 2
    layers = [int(generator.integers(1, half)), int(generator.integers(half, recipe.num_layers))]
    if recipe.agrees(step) and step % 2 == 0:
        layers[1] = half  # the default exit
    return torch.stack([tokens[s : s + length + 1] for s in starts]), torch.tensor(layers)


def held_out_chunks(tokens: Tensor, length: int, most: int) -> list[Tensor]:
    """Non-overlapping rows of `length + 1` ids, at most `most` of them, spread over the whole text."""
    rows = tokens[: tokens.numel() // (length + 1) * (length + 1)].view(-1, length + 1)
    return list(rows[:: math.ceil(len(rows) / most)])


@torch.no_grad()
def held_out_loss(model: LlamaForCausalLM, chunks: list[Tensor]) -> float:
    """Mean next-token cross-entropy in nats, at full depth."""
    losses = [F.cross_entropy(model(c[None, :-1], use_cache=False).logits[0].float(), c[1:]) for c in chunks]
    return float(torch.stack(losses).mean())


def train(
    recipe: DemoRecipe, model: LlamaForCausalLM, tokens: Tensor, held_out: Tensor, work: Path, compile_step: bool
) -> Iterator[dict[str, float]]:
    """Run the steps that are left; yields a record of losses and speed every few steps."""
    optimizers = build_optimizers(model, recipe)
    checkpoint = Checkpoint(work / "checkpoint.safetensors", model, optimizers)
    loss_function = EarlyExitLoss(model)
    step_loss = torch.compile(loss_function, dynamic=False) if compile_step else loss_function
    first, saved, since = checkpoint.load(), time.monotonic(), time.monotonic()
    for step in range(first, recipe.total_steps):
        for optimizer, rate in zip(optimizers, (recipe.muon_learning_rate, recipe.adam_learning_rate), strict=True):
            optimizer.param_groups[0]["lr"] = rate * recipe.learning_rate_factor(step)
        rows, exit_layers = draw_batch(tokens, recipe, step)
        with torch.autocast("cpu", torch.bfloat16):
            losses = step_loss(rows, exit_layers, recipe.agrees(step))
        (losses * recipe.loss_weights(step)).sum().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if (step + 1) % 25 == 0 or step + 1 == recipe.total_steps:
            speed = (step + 1 - first) * recipe.tokens_per_step / (time.monotonic() - since)
            names = ("loss", "shallow_exit_loss", "deep_exit_loss")
            record = dict(zip(names, losses.tolist(), strict=True)) | {"step": step + 1, "tokens_per_second": speed}
            if (step + 1) % 250 == 0:
                record["held_out_loss"] = held_out_loss(model, held_out_chunks(held_out, 512, 40))
            yield record
        if time.monotonic() - saved > 120 or step + 1 == recipe.total_steps:
            checkpoint.save(step + 1)
            saved = time.monotonic()


@torch.no_grad()
def teacher_forced_match_rates(
    model: PreTrainedModel, chunks: Sequence[Tensor], ks: Sequence[int], seed: int | None = None
) -> dict[int, dict[int, float]]:
    """Match rate of every intermediate layer on given text: `rates[exit_layer][k]`, in [0, 1].

    Full depth's choice at each position of each chunk (1-D token ids) is compared with the k best tokens of layers
    1..d-1 under the shared head: the model's final norm, then its `lm_head`. Without a seed choices are greedy, with
    one they are drawn at temperature 1 and ranked with the same noise.
    """
    hits: dict[int, dict[int, int]] = {}
    total = sum(chunk.numel() for chunk in chunks)
    noise = torch.zeros(())
    for number, chunk in enumerate(chunks):
        if seed is not None:
            sampler = Sampler(SamplingParams(temperature=1.0, seed=seed + number))
            noise = sampler.noise(0, len(chunk), model.config.vocab_size)
        hidden_states = model.model(chunk[None], output_hidden_states=True, use_cache=False).hidden_states
        chosen = (model.lm_head(hidden_states[-1]) + noise).argmax(-1, keepdim=True)
        for layer, hidden in enumerate(hidden_states[1:-1], start=1):
            ranked = (model.lm_head(model.model.norm(hidden)) + noise).topk(max(ks), dim=-1).indices
            for k in ks:
                row = hits.setdefault(layer, {})
                row[k] = row.get(k, 0) + int((ranked[..., :k] == chosen).sum())
    return {layer: {k: count / total for k, count in row.items()} for layer, row in hits.items()}


def write_card(
    out: Path, recipe: DemoRecipe, documents: list[Document], model: LlamaForCausalLM, held_out: Tensor
) -> None:
    """Write `card.json`: what the model was trained on, how, and what it reaches on held-out text."""
    chunks = held_out_chunks(held_out, 512, 200)
    texts = [chunk[:-1] for chunk in chunks]
    card = {
        "corpus": "Python standard library sources and pydoc_data topics; tests, encodings and tables left out",
        **{f"{name}_version": versions()[name] for name in ("python", "torch", "transformers")},
        "corpus_sha256": corpus_hash(documents),
        "held_out_files": sorted(d.path for d in documents if d.held_out),
        "steps": recipe.total_steps,
        "tokens_seen": recipe.total_steps * recipe.tokens_per_step,
        "recipe": asdict(recipe),
        "num_parameters": sum(p.numel() for p in model.parameters()),
        "held_out_loss": held_out_loss(model, chunks),
        "held_out_tokens": sum(c.numel() - 1 for c in chunks),
        "held_out_match_rate": teacher_forced_match_rates(model, texts, (1, 3, 5)),
        "held_out_sampled_match_rate": teacher_forced_match_rates(model, texts, (1, 3, 5), recipe.seed),
    }
    (out / "card.json").write_text(json.dumps(card, indent=2) + "\n")
    (out / "README.md").write_text(_card_text(card))


def _card_text(card: dict[str, Any]) -> str:
    """The card for people."""
    recipe = card["recipe"]
    greedy, sampled = card["held_out_match_rate"], card["held_out_sampled_match_rate"]
    rows = [
        f"| {layer} | " + " | ".join(f"{rate:.3f}" for rate in (*rates.values(), *sampled[layer].values())) + " |"
        for layer, rates in greedy.items()
    ]
    return "\n".join(
        [
            "# The demo model",
            "",
            f"A Llama with {recipe['num_layers']} layers of width {recipe['hidden_size']}, "
            f"{card['num_parameters']:,} parameters and a byte-level BPE vocabulary of {recipe['vocab_size']:,} "
            "tokens, trained from scratch with early-exit losses. It continues Python code; it knows nothing else.",
            "",
            f"- corpus: {card['corpus']}, of Python {card['python_version']}",
            f"- corpus SHA-256: `{card['corpus_sha256']}`; {len(card['held_out_files'])} files held out (`card.json`)",
            f"- tokens seen: {card['tokens_seen']:,} in {card['steps']:,} steps, seed {recipe['seed']}",
            f"- held-out loss: {card['held_out_loss']:.3f} nats for a token, over {card['held_out_tokens']:,} tokens",
            "- weights: bfloat16 safetensors; Apache-2.0; the corpus is under the PSF licence",
            "- trained in about an hour on 2 cores by `python -m tools.demo_model.train --compile "
            "--out ppd_runtime/models/demo --work build/demo-training`",
            "",
            "How often a layer's top k holds full depth's choice on the held-out text, greedy and sampled at "
            "temperature 1 (candidates ranked with the same noise):",
            "",
            "| exit layer | k = 1 | k = 3 | k = 5 | sampled, k = 1 | k = 3 | k = 5 |",
            "|---|---|---|---|---|---|---|",
            *rows,
            "",
        ]
    )


def main(arguments: list[str] | None = None) -> None:
    """Train, then write model, tokenizer and card to `--out`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the model, tokenizer and card")
    parser.add_argument("--work", type=Path, required=True, help="folder for checkpoints and the log")
    parser.add_argument("--steps", type=int, default=DemoRecipe.num_steps, help="optimizer steps")
    parser.add_argument("--seed", type=int, default=DemoRecipe.seed)
    parser.add_argument("--compile", action="store_true", help="compile the loss (needs a C++ compiler)")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    recipe = DemoRecipe(num_steps=options.steps, seed=options.seed)
    options.work.mkdir(parents=True, exist_ok=True)
    options.out.mkdir(parents=True, exist_ok=True)

    documents = read_standard_library()
    training = [d for d in documents if not d.held_out]
    tokenizer = train_tokenizer(training, recipe.vocab_size)
    tokens = encode(tokenizer, training)
    held_out = encode(tokenizer, [d for d in documents if d.held_out])
    logger.info("%d training tokens, %d held out", tokens.numel(), held_out.numel())
    model = build_model(recipe, tokenizer.eos_token_id)
    with (options.work / "log.jsonl").open("a") as log:
        for record in train(recipe, model, tokens, held_out, options.work, options.compile):
            log.write(json.dumps(record) + "\n")
            log.flush()
            logger.info("%s", {name: round(value, 3) for name, value in record.items()})
    model = model.to(torch.bfloat16).float()  # measure the weights that are shipped
    write_card(options.out, recipe, documents, model, held_out)
    model.to(torch.bfloat16).save_pretrained(options.out)
    tokenizer.save_pretrained(options.out)


if __name__ == "__main__":
    main()
