"""Settings of plug-ins: a store is named, unknown ones are refused, weights are fingerprinted."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvtide.integrations.engine_settings import refuse_unknown, require_store, weights_of
from kvtide.storage import StoreError

WHERE = "the tier"


def test_the_url_of_the_store_is_returned() -> None:
    assert require_store({"url": "memory:"}, WHERE) == "memory:"


@pytest.mark.parametrize("settings", [{}, {"url": None}, {"url": ""}, {"url": 5}])
def test_settings_without_a_store_are_refused(settings: dict[str, object]) -> None:
    with pytest.raises(StoreError, match='the tier names no store; add "url", such as "file:'):
        require_store(settings, WHERE)


def test_unknown_settings_are_refused_by_name() -> None:
    refuse_unknown({"url": "", "fingerprint": "", "theirs": 1}, WHERE, {"theirs"})
    with pytest.raises(StoreError, match="the tier has cap, size; kvtide knows url and fingerpr"):
        refuse_unknown({"url": "", "size": 1, "cap": 2}, WHERE)


# -- what stands for the weights --------------------------------------------------------------


@pytest.mark.parametrize("fingerprint", ["r1", 7])
def test_a_given_fingerprint_stands_for_the_weights(tmp_path: Path, fingerprint: object) -> None:
    model = saved(tmp_path / "model", b"weights")
    assert weights_of({"fingerprint": fingerprint}, WHERE, str(model)) == str(fingerprint)


@pytest.mark.parametrize("name", ["model.safetensors", "model-q4.gguf", "pytorch_model.bin"])
def test_weights_retrained_in_the_same_folder_are_others(tmp_path: Path, name: str) -> None:
    model = saved(tmp_path / "model", bytes(3 << 20), name)
    before = weights_of({}, WHERE, str(model))
    assert weights_of({"fingerprint": ""}, WHERE, str(model)) == before
    (model / "tokenizer.json").write_text("{}")
    assert weights_of({}, WHERE, str(model)) == before
    with (model / name).open("r+b") as file:  # A row in the middle of a large file.
        file.seek(2 << 20)
        file.write(b"\1" * 1024)
    assert weights_of({}, WHERE, str(model)) != before


def test_another_config_makes_other_weights(tmp_path: Path) -> None:
    model = saved(tmp_path / "model", b"weights")
    before = weights_of({}, WHERE, str(model))
    (model / "config.json").write_text('{"rope_theta": 1e6}')
    assert weights_of({}, WHERE, str(model)) != before


def test_a_file_of_weights_is_a_model(tmp_path: Path) -> None:
    model = saved(tmp_path / "model", b"weights", "model.gguf") / "model.gguf"
    before = weights_of({}, WHERE, str(model))
    model.write_bytes(b"others!")
    assert weights_of({}, WHERE, str(model)) != before


def test_a_name_of_the_hub_is_known_by_its_snapshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    repo = tmp_path / "models--some--model"
    for commit in ("aaa", "bbb"):
        saved(repo / "snapshots" / commit, commit.encode())
    (repo / "refs").mkdir()
    found = []
    for commit in ("aaa", "bbb"):
        (repo / "refs" / "main").write_text(commit)
        found.append(weights_of({}, WHERE, "some/model"))
    assert len({*found}) == 2
    assert weights_of({}, WHERE, "some/model", "aaa") == found[0]


@pytest.mark.parametrize("model", ["some/model", "a name that nothing has", "", "folder"])
def test_weights_that_are_not_on_this_machine_need_a_fingerprint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    if model == "folder":
        model = str(tmp_path)  # Without weights.
    with pytest.raises(StoreError, match=r'not known on this machine.*add "fingerprint"'):
        weights_of({}, WHERE, model)


def saved(folder: Path, weights: bytes, name: str = "model.safetensors") -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / name).write_bytes(weights)
    return folder
