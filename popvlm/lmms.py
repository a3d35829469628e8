"""A model for lmms-eval (https://github.com/EvolvingLMMs-Lab/lmms-eval), which finds it by popvlm's entry point:

    lmms-eval --model popvlm --model_args pretrained=Qwen/Qwen3-VL-8B-Instruct,plan=plan.json --tasks mmmu_val

Only lmms-eval imports this file.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby

import torch
from accelerate import Accelerator
from lmms_eval.api.instance import GenerationResult, Instance, TokenCounts
from lmms_eval.api.model import lmms
from lmms_eval.models.registry_v2 import ModelManifest
from lmms_eval.protocol import ChatMessages
from tqdm import tqdm

from popvlm import accelerate, answer

MANIFEST = ModelManifest(model_id="popvlm", chat_class_path="popvlm.lmms.PopVLM")


class PopVLM(lmms):  # type: ignore[misc]
    """A vision-language model under a pruning plan, or in full.

    Args:
        pretrained: a model's folder, a name on the hub, or an embedded model.
        plan: a plan's file, "last-third", "lossless", or "full" for the model without one.
        dtype: "auto" (the checkpoint's), or a torch dtype's name.
        attn_implementation: transformers' name, or None for its choice.
        device: "auto", "cpu", "cuda:1" and so on; under `accelerate launch` each process takes its own.
        batch_size: prompts in a batch.

    Raises:
        ModelError, PlanError: the model or the plan cannot be had; a sentence that names the fix.
    """

    is_simple = False

    def __init__(self, pretrained: str, plan: str = "last-third", dtype: str = "auto",
                 attn_implementation: str | None = None, device: str | None = None, batch_size: int | str = 1,
                 max_batch_size: int | None = None) -> None:
        super().__init__()
        self.accelerator = Accelerator()
        self._rank, self._world_size = self.accelerator.process_index, self.accelerator.num_processes
        if self._world_size > 1:
            device = str(self.accelerator.device)
        elif device in (None, "cuda"):  # lmms-eval's own default, also where there is no such device
            device = "auto"
        self.processor, self.model = answer.load(answer.find(pretrained), dtype=dtype, device=str(device),
                                                 attention=attn_implementation)
        self.processor.tokenizer.padding_side = "left"
        if plan != "full":
            accelerate(self.processor, self.model, plan=plan)
        self.batch_size = int(batch_size)
        self.device = self.model.device

    def generate_until(self, requests: list[Instance]) -> list[GenerationResult]:
        """Answers in the order of the requests; those of one task and one way to generate share batches."""
        results: dict[int, GenerationResult] = {}
        order = sorted(range(len(requests)), key=lambda index: (requests[index].args[4], str(requests[index].args[2]),
                                                                len(requests[index].args[0])))
        bar = tqdm(total=len(requests), disable=self._rank != 0, desc="popvlm")
        for _, same in groupby(order, key=lambda index: (requests[index].args[4], str(requests[index].args[2]))):
            for batch in _batches(same, self.batch_size):
                for index, result in zip(batch, self._answer([requests[index] for index in batch])):
                    results[index] = result
                    self.cache_hook.add_partial("generate_until", (requests[index].args[0], requests[index].args[2]),
                                                result.text)
                bar.update(len(batch))
        bar.close()
        return [results[index] for index in range(len(requests))]

    @torch.no_grad()
    def _answer(self, requests: list[Instance]) -> list[GenerationResult]:
        chats, images = [], []
        for _, to_messages, _, number, task, split in (request.args for request in requests):
            messages = ChatMessages(messages=to_messages(self.task_dict[task][split][number]))
            pictures, videos, audios = messages.extract_media()
            if videos or audios:
                raise NotImplementedError("popvlm's plugin asks about images and text; leave video and audio tasks out")
            images.append([picture.convert("RGB") for picture in pictures])
            chats.append([{"role": message.role, "content": [
                {"type": "text", "text": part.text} if part.type == "text" else {"type": "image"}
                for part in message.content]} for message in messages.messages])
        inputs = answer.chats_batch(self.processor, chats, images).to(self.model.device)
        how = dict(requests[0].args[2])
        until = [how["until"]] if isinstance(how.get("until"), str) else how.get("until") or []
        sampling = {name: how[name] for name in ("temperature", "top_p") if how.get(name) is not None} if (
            how.get("do_sample") and how.get("temperature")) else {}
        output = self.model.generate(**inputs, max_new_tokens=how.get("max_new_tokens", 1024),
                                     num_beams=how.get("num_beams") or 1, do_sample=bool(sampling), **sampling)
        written = output[:, inputs["input_ids"].shape[1]:]
        texts = self.processor.batch_decode(written, skip_special_tokens=True)
        padding = self.processor.tokenizer.pad_token_id
        return [GenerationResult(_cut(text, until).strip(), TokenCounts(output_tokens=int((row != padding).sum())))
                for text, row in zip(texts, written)]

    def loglikelihood(self, requests: list[Instance]) -> list[tuple[float, bool]]:
        """Not there."""
        raise NotImplementedError("popvlm's plugin generates; leave tasks of loglikelihood out")

    def generate_until_multi_round(self, requests: list[Instance]) -> list[str]:
        """Not there."""
        raise NotImplementedError("popvlm's plugin asks one round; leave multi-round tasks out")


def _batches(items: Iterable[int], size: int) -> Iterator[list[int]]:
    every = list(items)
    for start in range(0, len(every), size):
        yield every[start:start + size]


def _cut(text: str, until: Iterable[str]) -> str:
    for stop in until:
        text = text.split(stop, 1)[0] if stop else text
    return text
