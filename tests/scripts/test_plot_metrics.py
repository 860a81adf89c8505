from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from torchtitan.base.errors import DataError

SCRIPT = Path(__file__).parents[2] / "scripts" / "plot_metrics.py"


@pytest.fixture(scope="module")
def plot() -> ModuleType:
    spec = importlib.util.spec_from_file_location("plot_metrics", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _run(folder: Path, *, num_rows: int = 3, loss: float = 5.0) -> Path:
    folder.mkdir(parents=True)
    rows = [
        {
            "step": step,
            "loss": loss / step,
            "lr": 1e-3 * step,
            "grad_norm": 2.0 + step,
            "tokens_per_second": 1000.0 * step,
        }
        for step in range(1, num_rows + 1)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_panels_show_the_rows(plot: ModuleType, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    runs = {"a": plot._rows(_run(tmp_path / "a")), "b": plot._rows(_run(tmp_path / "b", loss=7.0))}
    figure = plot.draw(runs)
    panels = {axes.get_ylabel(): axes for axes in figure.axes}
    assert list(panels) == ["loss", "learning rate", "gradient norm", "tokens / s, all devices"]
    expected = {
        "loss": [5.0, 5.0 / 2, 5.0 / 3],
        "learning rate": [1e-3, 2e-3, 3e-3],
        "gradient norm": [3.0, 4.0, 5.0],
        "tokens / s, all devices": [1000.0, 2000.0, 3000.0],
    }
    for label, axes in panels.items():
        first, second = axes.get_lines()
        assert list(first.get_xdata()) == [1, 2, 3]
        assert list(first.get_ydata()) == expected[label]
        assert first.get_color() != second.get_color()
        assert axes.get_yscale() == "linear"
    assert list(panels["loss"].get_lines()[1].get_ydata()) == [7.0, 7.0 / 2, 7.0 / 3]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["a", "b"]


def test_validation_is_dashed_and_a_step_without_a_loss_is_left_out(plot: ModuleType) -> None:
    pytest.importorskip("matplotlib")
    figures = [(5.0, None), (None, 4.5), (3.0, 4.0)]
    rows = [
        {"step": step, "loss": loss, "lr": 1.0, "grad_norm": 1.0, "tokens_per_second": 9.0}
        | ({} if validation is None else {"validation_loss": validation})
        for step, (loss, validation) in enumerate(figures, start=1)
    ]
    figure = plot.draw({"a": rows, "b": [{**row, "validation_loss": None} for row in rows]})
    loss, validation, other = figure.axes[0].get_lines()
    assert [list(loss.get_xdata()), list(loss.get_ydata())] == [[1, 3], [5.0, 3.0]]
    assert [list(validation.get_xdata()), list(validation.get_ydata())] == [[2, 3], [4.5, 4.0]]
    assert (loss.get_linestyle(), validation.get_linestyle()) == ("-", "--")
    assert loss.get_color() == validation.get_color() != other.get_color()
    legend = [text.get_text() for text in figure.legends[0].get_texts()]
    assert legend == ["a", "a, validation", "b"]


def test_the_load_of_experts_has_a_panel_where_a_run_has_some(plot: ModuleType) -> None:
    pytest.importorskip("matplotlib")
    row = {"step": 1, "loss": 2.0, "lr": 1.0, "grad_norm": 1.0, "tokens_per_second": 9.0}
    dense = [row, {**row, "step": 2}]
    sparse = [
        {**row, "router/load_max_over_mean": 3.0},
        {**dense[1], **{next(iter(plot.LOAD)): 2.0}},
    ]
    assert len(plot.draw({"a": dense}).axes) == 4
    figure = plot.draw({"a": dense, "b": sparse})
    assert [axes.get_ylabel() for axes in figure.axes] == [
        *plot.PANELS.values(),
        *plot.LOAD.values(),
    ]
    empty, load = figure.axes[4].get_lines()
    assert list(empty.get_ydata()) == []
    assert list(load.get_ydata()) == [3.0, 2.0]


def test_smoothing(plot: ModuleType, tmp_path: Path) -> None:
    """An average of weights 1, w, w^2 ... backwards; the learning rate is no measurement."""
    pytest.importorskip("matplotlib")
    assert plot.smoothed([3.0] * 4, weight=0.9) == pytest.approx([3.0] * 4)
    expected = [4.0, (2 + 0.5 * 4) / 1.5, (8 + 0.5 * 2 + 0.25 * 4) / 1.75]
    assert plot.smoothed([4.0, 2.0, 8.0], weight=0.5) == pytest.approx(expected)
    figure = plot.draw({"a": plot._rows(_run(tmp_path / "a"))}, smooth=0.5)
    loss, lr = figure.axes[:2]
    pale, line = loss.get_lines()
    assert list(pale.get_ydata()) == [5.0, 5.0 / 2, 5.0 / 3]
    assert list(line.get_ydata()) == plot.smoothed([5.0, 5.0 / 2, 5.0 / 3], weight=0.5)
    assert pale.get_alpha() < 1
    assert len(lr.get_lines()) == 1
    with pytest.raises(SystemExit) as refused:
        plot.main([str(tmp_path / "a"), "--smooth", "1"])
    assert refused.value.code == 2


def test_writes_a_png(plot: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    out = tmp_path / "new" / "picture.png"
    runs = [_run(tmp_path / "a"), _run(tmp_path / "b", num_rows=1)]
    # a run may be given by its file as well
    assert plot.main([str(runs[0]), str(runs[1] / "metrics.jsonl"), "--out", str(out)]) == 0
    assert out.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert "a (3 rows), b (1 row)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "magic"),
    [("a.svg", b"<?xml"), ("a.pdf", b"%PDF-"), ("a.JPG", b"\xff\xd8\xff"), ("a.png", b"\x89PNG")],
)
def test_the_suffix_says_the_format(
    name: str, magic: bytes, plot: ModuleType, tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    assert plot.main([str(_run(tmp_path / "run")), "--out", str(tmp_path / name)]) == 0
    assert (tmp_path / name).read_bytes().startswith(magic)


@pytest.mark.parametrize(("name", "try_"), [("a.bmp", "a.png"), ("a", "a.png"), ("..x", "..png")])
def test_another_suffix_is_refused(
    name: str, try_: str, plot: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plot.main([str(_run(tmp_path / "run")), "--out", str(tmp_path / name)]) == 2
    said = capsys.readouterr().err
    assert said == (
        f"error: --out must end in .png, .svg, .pdf or .jpg, got {tmp_path / name}; "
        f"try {tmp_path / try_}\n"
    )
    assert not (tmp_path / name).exists()


def test_runs_of_one_name_are_told_apart(plot: ModuleType, tmp_path: Path) -> None:
    folders = [tmp_path / "x" / "outputs", tmp_path / "y" / "outputs"]
    assert list(plot._labels(folders)) == ["x/outputs", "y/outputs"]
    assert list(plot._labels([folders[0], tmp_path / "other"])) == ["outputs", "other"]
    assert list(plot._labels([folders[0], folders[0]])) == ["outputs"]


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("missing", "folder with a metrics.jsonl, got"),
        ("empty", "must have logged a step to be drawn"),
        ("damaged", " line 1 "),
    ],
)
def test_mistakes_are_one_message_and_exit_2(
    case: str, message: str, plot: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "metrics.jsonl").touch()
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "metrics.jsonl").write_text("what\nis this\n")
    good = _run(tmp_path / "good")
    out = tmp_path / "metrics.png"
    assert plot.main([str(good), str(tmp_path / case), "--out", str(out)]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ")
    assert message in captured.err
    assert captured.err.count("\n") == 1
    assert not out.exists()


def test_missing_matplotlib_is_a_clear_error(
    plot: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for module in [name for name in sys.modules if name.startswith("matplotlib.")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert plot.main([str(_run(tmp_path / "a")), "--out", str(tmp_path / "m.png")]) == 2
    assert "pip install" in capsys.readouterr().err


def test_an_output_that_cannot_be_written(
    plot: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    assert plot.main([str(_run(tmp_path / "a")), "--out", str(tmp_path)]) == 2
    assert "error: --out must be a file" in capsys.readouterr().err


def _balanced(*counts: list[list[int]]) -> list[dict[str, object]]:
    """Rows of steps 1, 2 ... with the tokens of each layer's experts."""
    return [
        {"step": step}
        | {f"router/counts/layers.{n}.moe": one for n, one in enumerate(layers, start=1)}
        for step, layers in enumerate(counts, start=1)
    ]


def test_the_load_of_experts(plot: ModuleType) -> None:
    pytest.importorskip("matplotlib")
    rows = _balanced([[1, 1, 1, 1], [2, 0]], [[2, 0, 2, 0], [1, 1]], [[0, 1, 3, 4], [3, 1]])
    run = {"a": [*rows, {"step": 9}]}  # the last row was written without
    [of_all, _] = plot.draw_experts(run).axes
    table = of_all.images[0].get_array().filled(-1.0).tolist()
    assert table == [[0.0, 0.5, 1.5, 2.0], [1.5, 0.5, -1.0, -1.0]]
    labels = [text.get_text() for text in of_all.get_yticklabels()]
    assert labels == ["layers.1.moe", "layers.2.moe"]
    assert "step 3" in of_all.get_title()
    for name in ("2", "layers.2.moe"):
        [of_one, _] = plot.draw_experts(run, layer=name).axes
        assert of_one.images[0].get_array().tolist() == [[2.0, 1.0, 1.5], [0.0, 1.0, 0.5]]
        assert [text.get_text() for text in of_one.get_xticklabels()] == ["1", "2", "3"]
    assert len(plot.draw_experts({**run, "b": rows}).axes) == 4


@pytest.mark.parametrize(
    ("layer", "rows", "said"),
    [
        ("all", [{"step": 1}], "has no row with any"),
        ("7", _balanced([[1, 1]]), "has layers layers.1.moe"),
    ],
)
def test_experts_that_were_not_counted(
    plot: ModuleType, layer: str, rows: list[dict[str, object]], said: str
) -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(DataError, match=said):
        plot.draw_experts({"a": rows}, layer=layer)
