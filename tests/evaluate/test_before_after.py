"""Samples with the outputs of both models, in the report of a run."""

import base64
import io
from types import SimpleNamespace

import families
import menagerie
import torch
from PIL import Image

import iobs
from iobs.evaluate import BeforeAfter, before_after

OPTIONS = {"solver": "magnitude", "holdout": 0.0}


def test_pictures_have_the_labels_of_both_models():
    model, batches = menagerie.build("convolutional")
    data = [(pixels, torch.arange(len(pixels)) % 4) for pixels in batches]
    expected = model(data[0][0]).argmax(1).tolist()
    report = iobs.prune(model, data, 0.9, "one-shot", callbacks=[BeforeAfter(data)], **OPTIONS)
    assert [one.dense for one in report.samples] == [str(one) for one in expected]
    assert [one.pruned for one in report.samples] == [str(one) for one in model(data[0][0]).argmax(1).tolist()]
    assert [one.label for one in report.samples] == [str(number % 4) for number in range(8)]
    with Image.open(io.BytesIO(base64.b64decode(report.samples[0].shown.split(",")[1]))) as image:
        assert image.size == (8, 8)


def in_numbers(tokens, skip_special_tokens):
    assert skip_special_tokens
    return " ".join(map(str, tokens))


def test_prompts_begin_where_texts_begin():
    long, tail = torch.arange(10, 50), torch.arange(60, 100)
    middle = torch.cat([long[:7], torch.tensor([1]), long[:32]])
    for rows, expected in (
        ([middle, tail], [[1, *range(10, 33)], [1, *range(60, 83)]]),
        ([long, tail], [[1, *range(10, 33)], [1, *range(60, 83)]]),
    ):
        shown = BeforeAfter([{"input_ids": torch.stack(rows)}], SimpleNamespace(bos_token_id=1))
        found = [prompt.tolist() for prompt in shown._prompts()]
        assert found == expected[: len(found)]
    unmarked = BeforeAfter([{"input_ids": torch.stack([long, tail])}], SimpleNamespace(bos_token_id=None))
    assert [prompt.tolist() for prompt in unmarked._prompts()] == [[*range(10, 34)], [*range(60, 84)]]


def test_text_is_continued_by_both_models():
    model, data = families.build("llama")
    tokenizer = SimpleNamespace(decode=in_numbers)
    before = [value.clone() for value in model.parameters()]
    report = iobs.prune(model, data, 0.9, "one-shot", callbacks=[BeforeAfter(data, tokenizer)], **OPTIONS)
    assert len(report.samples) == 2
    first = report.samples[0]
    assert first.shown == " ".join(map(str, data[0]["input_ids"][0, :24].tolist()))
    after = model(input_ids=data[0]["input_ids"][:1, :24]).logits[0, -1].argmax()
    assert first.pruned.split()[0] == str(int(after))
    with torch.no_grad():
        for value, old in zip(model.parameters(), before, strict=True):
            value.copy_(old)
    dense = model(input_ids=data[0]["input_ids"][:1, :24]).logits[0, -1].argmax()
    assert first.dense.split()[0] == str(int(dense))


def test_slow_models_continue_for_fewer_tokens(monkeypatch):
    now, calls, seconds = [0.0], [], [1.0]

    class Slow(torch.nn.Embedding):
        def forward(self, input_ids):
            now[0] += seconds[0]
            calls.append(input_ids.shape[1])
            return super().forward(input_ids)

    monkeypatch.setattr(before_after, "time", SimpleNamespace(monotonic=lambda: now[0]))
    shown = BeforeAfter([{"input_ids": torch.arange(48).view(2, 24)}], SimpleNamespace(decode=in_numbers))
    shown.on_start(Slow(48, 48), [], 1)
    assert calls == [24, 25, 26, 27] + [24, 25, 26, 27, 28] * 2  # ten seconds for two texts, after four tokens of trial
    seconds[0] = 0.0
    shown.on_start(Slow(48, 48), [], 1)  # another run, of a fast model
    assert [len(one.split()) for one in shown._dense] == [40, 40]


def test_continuations_with_a_cache_are_those_without(embedded, monkeypatch):
    prompt = torch.randint(0, 500, (1, 24), generator=torch.Generator().manual_seed(0))
    cached = before_after._most_likely(embedded.module, prompt, 20)
    monkeypatch.setattr(before_after, "takes_cache", lambda model: False)
    assert torch.equal(cached, before_after._most_likely(embedded.module, prompt, 20))


def test_pictures_with_a_text_that_cannot_be_decoded_are_shown():
    class Answering(torch.nn.Linear):
        def forward(self, input_ids, pixel_values):
            return super().forward(pixel_values.flatten(1))

    data = [{"input_ids": torch.arange(8).view(2, 4), "pixel_values": torch.rand(2, 3, 4, 4)}]
    model, report = Answering(48, 3), SimpleNamespace(samples=[])
    shown = BeforeAfter(data)
    shown.on_start(model, [], 1)
    shown.on_end(report)
    expected = model(**data[0]).argmax(1).tolist()
    assert [one.pruned for one in report.samples] == [str(one) for one in expected]
    assert all(one.is_image for one in report.samples)


def test_other_data_and_streamed_models_give_no_samples(tmp_path):
    model, data = menagerie.build("perceptron")
    assert not iobs.prune(model, data, 0.5, "one-shot", callbacks=[BeforeAfter(data)], **OPTIONS).samples
    families.saved("llama", tmp_path / "model")
    batches = families.language_batches()
    tokenizer = SimpleNamespace(decode=str)
    shown = BeforeAfter(batches, tokenizer)
    report = families.prune_directory(
        tmp_path / "model", tmp_path / "out", batches, solver="magnitude", callbacks=[shown]
    )
    assert not report.samples
