"""Rows of images, sound and text: forms of records, where the loss falls, costs, and what is refused."""

from __future__ import annotations

import builtins
import json
import wave
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from harness.chat_model import CHATS
from harness.vision_folders import (
    CHATML,
    KIND_OF,
    MARKED,
    MODELS,
    draw,
    record,
    run_file,
    write_llava,
    write_qwen,
)
from hyper_parallel.config import RunConfig
from hyper_parallel.data import MultimodalData, TextData, load_data
from hyper_parallel.data.document import Chat, from_record, is_held_out
from hyper_parallel.data.media import Media, load_audio, load_image
from hyper_parallel.data.packing import IGNORED
from hyper_parallel.data.processor import AlignedText
from hyper_parallel.errors import DataError, HyperParallelError

ASKED, SAID = CHATS[0]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    for name, write in MODELS.items():
        (folder / name).mkdir()
        write(folder / name)
    draw(folder / "images", [(16, 16), (24, 16)])
    return folder


def data_of(
    place: Path, rows: list[dict[str, Any]] | None, model: str = "qwen2.5-vl", **data: Any
) -> MultimodalData:
    """What `load_data` makes of these records."""
    if rows is not None:
        (place / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = RunConfig.model_validate(
        run_file(
            place, model, data={**run_file(place, model)["data"], "train": str(place / "rows.jsonl"), **data}
        )
    )
    found = load_data(config.data, family=model, kinds={KIND_OF.get(model, "image")})
    assert isinstance(found, MultimodalData)
    return found


def refusal(place: Path, rows: list[dict[str, Any]] | None, **data: Any) -> str:
    with pytest.raises(HyperParallelError) as caught:
        data_of(place, rows, **data)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def loss_text(data: MultimodalData, row: int = 0) -> str:
    """The text of the tokens that bear loss."""
    labels = data.train.batch([row])["labels"][0]
    return str(data.tokenizer.transformers.decode(labels[labels != IGNORED]))


def shown(data: MultimodalData, row: int = 0) -> str:
    return str(data.tokenizer.transformers.decode(data.train.batch([row])["input_ids"][0]))


def parts(*content: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(content)}, {"role": "assistant", "content": SAID}]}


def chat(content: str, **more: Any) -> dict[str, Any]:
    return {
        "messages": [{"role": "user", "content": content}, {"role": "assistant", "content": SAID}],
        **more,
    }


TEXT = {"type": "text", "text": ASKED}
FORMS = [
    parts({"type": "image", "image": "images/0.png"}, TEXT),
    parts({"type": "image", "path": "images/0.png"}, TEXT),
    parts({"type": "image", "url": "images/0.png"}, TEXT),
    parts({"type": "image_url", "image_url": {"url": "images/0.png"}}, TEXT),
    {**parts({"type": "image"}, TEXT), "images": ["images/0.png"]},
    chat(f"<image>{ASKED}", images=["images/0.png"]),
    chat(f"<image>{ASKED}", image="images/0.png"),
]


def test_every_form_of_a_record_is_the_same_row(place: Path) -> None:
    data = data_of(place, FORMS)
    assert shown(data) == (
        f"<|im_start|>user\n<|vision_start|>{'<|image_pad|>' * 4}<|vision_end|>{ASKED}<|im_end|>\n"
        f"<|im_start|>assistant\n{SAID}<|im_end|>\n"
    )
    first = data.train.batch([0])
    for row in range(len(FORMS)):
        assert loss_text(data, row) == f"{SAID}<|im_end|>"
        for name, tensor in data.train.batch([row]).items():
            torch.testing.assert_close(tensor, first[name], rtol=0, atol=0)


def test_prompts_and_texts_have_images(place: Path) -> None:
    data = data_of(
        place,
        [
            {"prompt": f"<image>{ASKED}", "response": SAID, "images": ["images/0.png"]},
            {"text": f"{ASKED}<image>{SAID}", "images": ["images/1.png"]},
        ],
    )
    assert shown(data) == f"<|vision_start|>{'<|image_pad|>' * 4}<|vision_end|>{ASKED}{SAID}<|endoftext|>"
    assert loss_text(data) == f"{SAID}<|endoftext|>"
    # The first token of a text is never predicted.
    assert f"{ASKED}{SAID}<|endoftext|>".endswith(loss_text(data, 1)) and SAID in loss_text(data, 1)
    assert len(loss_text(data, 1)) >= len(f"{ASKED}{SAID}<|endoftext|>") - 3


@pytest.mark.parametrize("template", [CHATML, MARKED], ids=["by rendering", "marked"])
@pytest.mark.parametrize("write", [write_llava, write_qwen])
def test_only_answers_bear_loss_however_the_template_tells_them(
    tmp_path: Path, template: str, write: Any
) -> None:
    (tmp_path / "own").mkdir()
    write(tmp_path / "own", template)
    draw(tmp_path / "images", [(16, 16), (24, 16)])
    turns = [
        {"role": "user", "content": f"<image><image>{ASKED}"},
        {"role": "assistant", "content": SAID},
        {"role": "user", "content": f"{CHATS[1][0]}<image>"},
        {"role": "assistant", "content": CHATS[1][1]},
    ]
    names = ["images/0.png", "images/1.png", "images/0.png"]
    data = data_of(tmp_path, [{"messages": turns, "images": names}], model="own")
    assert loss_text(data) == f"{SAID}<|im_end|>{CHATS[1][1]}<|im_end|>"
    batch = data.train.batch([0])
    ids, labels = batch["input_ids"][0], batch["labels"][0]
    bears = labels != IGNORED
    assert torch.equal(labels[bears], ids.roll(-1)[bears])


def test_recordings_are_processed_like_images(place: Path) -> None:
    record(place / "audios", [8000, 4000])
    data = data_of(
        place,
        [
            parts({"type": "audio", "audio": "audios/0.wav"}, TEXT),
            chat(f"<audio>{ASKED}", audios=["audios/0.wav"]),
            parts({"type": "audio", "path": "audios/1.wav"}, TEXT),
        ],
        model="qwen2-audio",
    )
    first, second, shorter = (data.train.batch([row]) for row in range(3))
    for name, tensor in first.items():
        torch.testing.assert_close(tensor, second[name], rtol=0, atol=0)
    # 100 frames a second, halved twice, between a token where sound begins and one where it ends.
    assert shown(data).count("<|AUDIO|>") == 25 and shown(data, 2).count("<|AUDIO|>") == 12
    assert loss_text(data) == loss_text(data, 2) == f"{SAID}<|im_end|>"
    assert [data.train.cost(row).media_tokens for row in (0, 2)] == [25 + 2, 12 + 2]
    assert shorter["feature_attention_mask"].sum() == 50


def test_costs_are_known_before_a_row_is_loaded_and_agree_with_it(place: Path) -> None:
    row = parts({"type": "image", "image": "images/1.png"}, {"type": "image", "image": "images/0.png"}, TEXT)
    data = data_of(place, [row, chat(ASKED)])
    batch = data.train.batch([0, 1])
    tokens = batch["attention_mask"].sum(1).tolist()
    assert data.train.cost(0)[3:] == (tokens[0], 6 + 4, batch["pixel_values"].numel(), 2)
    assert data.train.cost(1)[3:] == (tokens[1], 0, 0, 0)
    assert batch["image_grid_thw"].prod(1).tolist() == [24, 16]
    assert batch["input_ids"].shape[1] == data.train.positions([0, 1]) == max(tokens)
    assert data.train.positions([0, 1], 8) == -(-max(tokens) // 8) * 8


def test_padding_is_right_and_bears_no_loss(place: Path) -> None:
    data = data_of(place, [FORMS[0], chat(ASKED)])
    alone, wide = data.train.batch([1]), data.train.batch([0, 1], 64)
    length = alone["input_ids"].shape[1]
    for name in ("input_ids", "labels", "attention_mask"):
        assert torch.equal(wide[name][1, :length], alone[name][0])
    assert (wide["labels"][:, length:][1] == IGNORED).all() and not wide["attention_mask"][1, length:].any()


def test_the_index_is_read_again_and_follows_the_files(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [FORMS[0], chat(ASKED)]
    first = data_of(place, rows)
    with monkeypatch.context() as patched:
        patched.setattr("hyper_parallel.data.processor.Processor.measure", None)
        again = data_of(place, rows)
        assert [again.train.cost(row) for row in range(2)] == [first.train.cost(row) for row in range(2)]
    before = (place / "images/0.png").read_bytes()
    try:
        draw(place / "images", [(32, 32)])
        changed = data_of(place, rows)
        assert changed.train.cost(0).media_tokens == 16 and first.train.cost(0).media_tokens == 4
        assert changed.identity != first.identity
        with pytest.raises(DataError, match=r"rows.jsonl, line 1: it had \d+ tokens when the run began"):
            first.train.batch([0])
    finally:
        (place / "images/0.png").write_bytes(before)


def test_a_share_is_held_out_by_content(place: Path) -> None:
    rows = [chat(f"<image>{n} {ASKED}", images=["images/0.png"]) for n in range(12)]
    data = data_of(place, rows, holdout=0.3)
    documents = [from_record(row, "") for row in rows]
    held = sum(is_held_out(one, 0.3) for one in documents if one is not None)
    assert 0 < held == len(data.eval) and len(data.train) == 12 - held
    other = from_record(chat(f"<image>0 {ASKED}", images=["images/1.png"]), "")
    assert any(
        is_held_out(other, share) != is_held_out(documents[0], share) for share in np.linspace(0, 1, 50)
    )


def test_datasets_folders_with_images(place: Path) -> None:
    import datasets

    names = [str(place / name) for name in ("images/0.png", "images/1.png")]
    features = datasets.Features(
        {
            "messages": [{"role": datasets.Value("string"), "content": datasets.Value("string")}],
            "images": datasets.List(datasets.Image()),
        }
    )
    turns = [{"role": "user", "content": f"<image>{ASKED}"}, {"role": "assistant", "content": SAID}]
    table = datasets.Dataset.from_dict(
        {"messages": [turns] * 2, "images": [[name] for name in names]}, features
    )
    # As a pushed or mapped dataset has them: their bytes, and no path.
    whole = datasets.Dataset.from_dict(
        {"messages": [turns], "images": [[{"bytes": Path(names[0]).read_bytes(), "path": None}]]}, features
    )
    datasets.concatenate_datasets([table, whole]).save_to_disk(str(place / "table"))
    data, lines = data_of(place, None, train=str(place / "table")), data_of(place, [FORMS[5]])
    for row in (0, 2):
        for name, tensor in data.train.batch([row]).items():
            torch.testing.assert_close(tensor, lines.train.batch([0])[name], rtol=0, atol=0)
    assert data.train.cost(1).media_tokens == 6


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([FORMS[0], chat("<image>", images=["no.png"])], ["rows.jsonl, line 2: ", "/no.png does not exist"]),
        ([chat("<image>", images=["rows.jsonl"])], ["line 1: ", "rows.jsonl cannot be read as an image"]),
        ([chat("<image>", images=["images"])], ["line 1: ", "/images cannot be read: it is a folder"]),
        ([chat("<image>", images=["images/0.png"] * 2)], ["shows 1 image, and 2 are given"]),
        (
            [chat(ASKED, images=["images/0.png"])],
            ["line 1: the text shows 0 images, and 1 are given", "<image>"],
        ),
        (
            [chat("<image><image>", images=["images/0.png"])],
            ["message 0 has one more <image> than the 1 image"],
        ),
        ([parts({"type": "image"}, TEXT)], ["message 0, part 0 is one more image than the 0 images"]),
        (
            [parts({"type": "video", "video": "a.mp4"})],
            ["message 0, part 0: videos cannot be trained on yet"],
        ),
        ([chat(ASKED, videos=["a.mp4"])], ["'videos': videos cannot be trained on yet"]),
        ([parts({"type": "picture"})], ["message 0, part 0: its 'type' is 'picture'"]),
        ([parts("text")], ["message 0, part 0 is a str"]),
        ([chat("<image>", images=["https://example.org/a.png"])], ["an address, and nothing is fetched"]),
        ([chat("<image>", images=[3])], ["an image is given as a int"]),
        (
            [chat("<image>", images=["images/0.png"], image="images/0.png")],
            ["'image' and another key list its images"],
        ),
        (
            [{"messages": [{"role": "assistant", "content": "<image>"}], "images": ["images/0.png"]}],
            ["message 0, an answer, has media"],
        ),
        (
            [chat("<audio>", audios=["a.wav"])],
            ["line 1: a recording, and qwen2.5-vl takes images beside text"],
        ),
        (
            [chat(f"<image><|image_pad|>{ASKED}", images=["images/0.png"])],
            # What it says behind that is of the release.
            ["line 1: the model's processor does not take this"],
        ),
    ],
)
def test_what_is_wrong_is_named_in_one_line(
    place: Path, rows: list[dict[str, Any]], expected: list[str]
) -> None:
    message = refusal(place, rows)
    for part in expected:
        assert part in message


def test_a_sample_is_never_cut(place: Path) -> None:
    tokens = data_of(place, [FORMS[0]]).train.cost(0).tokens
    message = refusal(place, [FORMS[0]], sequence=tokens - 1)
    assert f"rows.jsonl, line 1: the sample has {tokens} tokens, 4 of them of its media," in message
    assert data_of(place, [FORMS[0]], sequence=tokens).train.sequence == tokens


def test_what_the_model_lacks_is_named(place: Path) -> None:
    rows = place / "rows.jsonl"
    rows.write_text(json.dumps(FORMS[0]) + "\n")
    config = RunConfig.model_validate(run_file(place, "qwen2.5-vl")).data.model_copy(
        update={"train": str(rows)}
    )
    with pytest.raises(DataError, match=r"rows.jsonl, line 1: an image, and llama takes text alone"):
        load_data(config, family="llama", kinds=())
    bare = place / "bare"
    bare.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (bare / name).write_bytes((place / "qwen2.5-vl" / name).read_bytes())
    without = config.model_copy(update={"tokenizer": config.tokenizer.model_copy(update={"path": str(bare)})})
    with pytest.raises(
        DataError, match=r"line 1: an image, and .*/bare has no processor \(preprocessor_config.json"
    ):
        load_data(without, family="llava", kinds={"image"})
    rows.write_text(json.dumps({"text": ASKED}) + "\n" + json.dumps({"text": SAID}) + "\n")
    text = load_data(config.model_copy(update={"pack": False}), family="llava", kinds={"image"})
    assert isinstance(text, TextData) and len(text.train) == 2


def test_texts_around_media_are_found_again() -> None:
    found = AlignedText.of("a<i>b<i><i>c<e>", "a<i><i>b<i><x><i>c<e>", ["<i>", "<e>"])
    assert found is not None
    assert found.in_text(0, 1) == (0, 1) and found.in_text(7, 8) == (4, 5)
    assert found.in_text(1, 4) is None and found.in_text(8, 11) is None and found.in_text(11, 14) is None
    # What is not written out is text, as a token that ends an answer.
    assert found.in_text(17, 18) == (11, 12) and found.in_text(18, 21) == (12, 15)
    assert AlignedText.of("abc", "abd", ["<i>"]) is None
    assert AlignedText.of("a<i>b", "a<i>c", ["<i>"]) is None
    assert AlignedText.of("abc", "xabc", []) is None


def test_uncompressed_sound_is_read_without_other_packages(tmp_path: Path) -> None:
    wanted = np.array([0, 16384, -32768, 32767], "<i2")
    path = tmp_path / "a.wav"
    with wave.open(str(path), "wb") as file:
        file.setnchannels(2)
        file.setsampwidth(2)
        file.setframerate(8000)
        file.writeframes(np.repeat(wanted, 2).tobytes())
    found = load_audio(Media("audio", "a.wav", path), "here", 8000)
    np.testing.assert_allclose(found, wanted / 32768, atol=1e-7)
    path.write_bytes(b"RIFFnothing")
    with pytest.raises(DataError, match=r"here: .*a.wav"):
        load_audio(Media("audio", "a.wav", path), "here", 8000)


def test_a_conversation_of_text_parts_has_no_media() -> None:
    found = from_record(parts(TEXT, TEXT), "here")
    assert isinstance(found, Chat) and found.messages[0]["content"] == [TEXT, TEXT] and not found.media
    assert found.content().startswith(ASKED * 2)


def test_missing_packages_are_named(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    image = Media("image", "0.png", place / "images/0.png")
    sound = tmp_path / "a.wav"
    with wave.open(str(sound), "wb") as file:
        file.setparams((1, 2, 8000, 0, "NONE", ""))
    real = builtins.__import__

    def without(name: str, *rest: Any, **more: Any) -> Any:
        if name in ("PIL", "transformers.audio_utils"):
            raise ImportError(name)
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(
        DataError, match=r"here: images are read by Pillow; pip install 'hyper-parallel\[images\]'"
    ):
        load_image(image, "here")
    with pytest.raises(DataError, match=r"here: .*a.wav is no WAV file of 16000 .*'hyper-parallel\[audio\]'"):
        load_audio(Media("audio", "a.wav", sound), "here", 16000)
