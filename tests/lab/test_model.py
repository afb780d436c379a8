"""`tapwise bench --model` on a tiny model: what is verified, timed, written and refused."""

from __future__ import annotations

import json
import math
import weakref
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

pytest.importorskip("torch")

import torch

import tapwise.torch
from tapwise.cli import app
from tapwise.errors import InvalidProblem
from tapwise.lab import model, named_model, records, report

runner = CliRunner()
SOURCE = """
import torch
from torch import nn

def net():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(8, 10),
    )

def number():
    return 1

def fails():
    raise OSError("no weights")

def of_text():
    return nn.Embedding(4, 4)

limit = 3
"""


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "tiny.py"
    path.write_text(SOURCE)
    return str(path)


@pytest.fixture(autouse=True)
def no_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor takes seconds a model."""
    monkeypatch.setattr(torch, "compile", lambda module, **words: module)


def options(file: str, **words: Any) -> model.Options:
    return model.Options(f"{file}:net", **{"n": 4, "size": 16, "seconds": 0.01, "repeats": 2} | words)


def test_a_table_and_a_record_that_report_reads(file: str, tmp_path: Path) -> None:
    out = tmp_path / "results"
    words = ["bench", "--model", f"{file}:net", "--n", "2", "--size", "16", "--seconds", "0.01", "--repeats", "2"]
    result = runner.invoke(app, [*words, "--layers", "--json", str(out)], env={"COLUMNS": "100"})
    assert result.exit_code == 0, result.output
    table = result.stdout.partition("1 convolutions fused")[0]
    assert max(map(len, table.splitlines())) <= 100
    (path,) = out.glob("*/*.json")
    assert path.name == "model-tiny-net-16-f32-n2.json"
    (row,) = json.loads(path.read_text())
    names = ["eager", "eager, channels last", "compile", "compile, frozen", "onnxruntime"]
    ours = ["optimize", "optimize(graphs=True)", "optimize + compile"]
    assert list(row["peers"]) == names and list(row["algorithms"]) == ours
    assert row["verified"] and row["time_us"] > 0 and row["images"] == 8
    for variant in row["variants"]:
        assert variant["reason"] == "" and variant["error"] <= row["bound"] and variant["top1"] == 1, variant
        assert variant["time_us"] > 0 and variant["ratio"] > 0
    assert row["layers"][0]["problem"].startswith("n2 c3 h16 w16 k8")
    found = report.load(out)
    assert report.markdown("summary", found) == ""
    name = f"{path.parent.name}/{path.stem}"
    assert report.markdown("models", found) == report.markdown(name, found)
    assert "tiny-net n2 size16 f32" in report.markdown("models", found)
    again = runner.invoke(app, ["report", "--compare", str(out), str(path)])
    assert again.exit_code == 0, again.output
    assert "1 SAME" in again.output or "1 UNSURE" in again.output


def test_names_of_files(file: str) -> None:
    row, _ = model.measure(options(file, size=records.IMAGE_SIZE, n=8, dtype="bfloat16"))
    assert row.file_name == "model-tiny-net-bf16-n8.json"
    assert row.verified
    own = max(one["error"] for one in row.variants if one["name"].startswith("eager"))
    assert row.bound == model.FACTOR * max(own, torch.finfo(torch.bfloat16).eps / 2)
    assert "BFloat16" in row.peers_missing["onnxruntime"]


def test_what_fails_is_a_row_with_its_reason(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def compile(module: Any, **words: Any) -> Any:
        raise RuntimeError("no compiler\nfound")

    monkeypatch.setattr(torch, "compile", compile)
    row, _ = model.measure(options(file, max_autotune=True))
    failed = {one["name"] for one in row.variants if one["reason"] == "RuntimeError: no compiler"}
    assert failed == {"compile", "compile, frozen", "compile, frozen, max-autotune", "optimize + compile"}
    assert row.verified and row.algorithm in ("cpu.optimize", "cpu.optimize(graphs=True)")
    assert row.fastest.startswith("eager")


@pytest.mark.parametrize("wrong", [1.01, math.nan])
def test_what_is_wrong_is_not_timed(file: str, wrong: float, monkeypatch: pytest.MonkeyPatch) -> None:
    real = tapwise.torch.optimize

    def optimize(*words: Any, **named: Any) -> Any:
        made = real(*words, **named)
        made.register_forward_hook(lambda module, inputs, y: y * torch.linspace(1, wrong, 10))
        return made

    monkeypatch.setattr(tapwise.torch, "optimize", optimize)
    row, _ = model.measure(options(file))
    assert not row.verified and row.time_us is None and not row.algorithms
    assert not any("time_us" in one for one in row.variants if one["by"] == model.OURS)
    assert "is allowed" in row.reason
    words = ["bench", "--model", f"{file}:net", "--size", "16", "--seconds", "0", "--repeats", "1"]
    assert runner.invoke(app, words).exit_code == 1


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("{}:none", "has no function none"),
        ("{}:limit", "has no function limit"),
        ("{}:number", "gives a int"),
        ("{}:fails", "no weights"),
        ("{}:of_text", "does not take images"),
        ("nowhere.py:net", "no file"),
        ("nowhere.onnx", "no file"),
        ("no_such_model", "file.py:function"),
    ],
)
def test_names_that_give_no_model(name: str, says: str, file: str) -> None:
    result = runner.invoke(app, ["bench", "--model", name.format(file), "--size", "16"])
    assert result.exit_code == 2
    assert says in result.output and len(result.output.strip().splitlines()) == 1


@pytest.mark.parametrize("words", [["c3 h9 w7 k5 r3 s3"], ["--dtype", "f64"], ["--n", "0"], ["--threads", "1"]])
def test_options_that_a_model_has_not(words: list[str], file: str) -> None:
    result = runner.invoke(app, ["bench", *words, "--model", f"{file}:net", "--size", "16"])
    assert result.exit_code == 2 and "Traceback" not in result.output


@pytest.mark.parametrize("words", [["--size", "64"], ["--layers"], ["--max-autotune"]])
def test_options_of_a_model_alone(words: list[str]) -> None:
    found = runner.invoke(app, ["bench", "c3 h9 w7 k5 r3 s3", *words])
    assert found.exit_code == 2
    assert "go with --model" in found.output


def test_batch_norm_is_settled() -> None:
    net = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4)).eval()
    named_model._settle(net, 16)
    assert not net[1].training and not net[1]._forward_pre_hooks
    with torch.no_grad():
        y = net(torch.randn(8, 3, 16, 16))
    assert 0.8 < float(y.square().mean()) < 1.2


def test_pixels_have_classes(file: str) -> None:
    measured = model.Measured(options(file))
    with torch.no_grad():
        assert measured.compare(measured.model) == (0.0, 1.0)
    measured.expected = [[torch.zeros(4, 2, 2, 2)] for _ in measured.images]
    # Of four pixels one gets another class.
    other = torch.zeros(4, 2, 2, 2)
    other[:, 1, 0, 0] = 0.5
    assert measured.compare(lambda x: other) == (0.5, 0.75)
    with pytest.raises(ValueError, match="instead of"):
        measured.compare(lambda x: other[:1])
    with pytest.raises(ValueError, match="no tensor"):
        measured.compare(lambda x: 1)
    with pytest.raises(InvalidProblem, match="nothing finite"):
        model._bound("f16", [{"name": "eager", "by": model.PYTORCH, "error": math.nan, "reason": ""}])


def test_what_is_captured_keeps_its_function(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph reads the weights' memory, and holds no tensor."""
    monkeypatch.setattr(model, "capture", lambda function: (None, function()))
    net = torch.nn.Linear(3, 3)
    alive = weakref.ref(net.weight)
    captured = model.Captured(net, torch.ones(2, 3))
    del net
    assert alive() is not None
    del captured
    assert alive() is None


@pytest.mark.cuda
def test_on_a_gpu_in_graphs(file: str) -> None:
    """A call with new images through each graph, and times of all."""
    for dtype in ("f32", "f16"):
        row, _ = model.measure(options(file, device="cuda", dtype=dtype))
        assert row.verified, row.variants
        # Nothing is excused: `no_inductor` stands in for torch.compile, and onnxruntime is no variant here.
        reasons = {one["name"]: one["reason"] for one in row.variants if one["reason"]}
        assert not reasons, (dtype, reasons)
        assert {"optimize, graph", "optimize(graphs=True)"} < set(row.algorithms)
