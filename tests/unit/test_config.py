"""What a wrong configuration is told, as golden text, and what a right one means.

`golden/NAME.yaml` is a configuration with something wrong, `golden/NAME.txt` what is said of it.
`python tests/unit/test_config.py` writes the texts anew: read the diff before you keep it.
"""

import inspect
import re
from pathlib import Path

import pytest
import yaml

from offload.sizes import format_count, format_size, parse_size
from perfect.config.grid_reader import read_recipe
from perfect.config.schema import RunConfig, dump_config
from perfect.config.yaml_reader import read_config
from perfect.errors import ConfigError
from trainers import OffloadStrategy

GOLDEN = Path(__file__).parent / "golden"
CASES = sorted(path.stem for path in GOLDEN.glob("*.yaml"))

PLAIN = """\
model: {name: resnet18}
data: {name: cifar10}
phases:
  - {name: train, passes: 2}
"""


def complaints(path: Path) -> str:
    """Everything said about a file, its name without the folders in front."""
    try:
        read_recipe(path)
    except ConfigError as error:
        return "".join(p.replace(f"{path.parent}/", "") + "\n" for p in error.problems)
    return "reads without a problem\n"


def read(text: str, folder: Path) -> RunConfig:
    path = folder / "run.yaml"
    path.write_text(text, encoding="utf-8")
    return read_config(path)[0]


def problems(text: str, folder: Path) -> list[str]:
    with pytest.raises(ConfigError) as error:
        read(text, folder)
    return [problem.replace(f"{folder}/", "") for problem in error.value.problems]


# ---- wrong configurations -----------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
def test_a_wrong_configuration_is_told_what_the_golden_text_says(case: str) -> None:
    expected = (GOLDEN / f"{case}.txt").read_text(encoding="utf-8")
    assert complaints(GOLDEN / f"{case}.yaml") == expected


def test_every_golden_text_belongs_to_a_configuration_and_complains() -> None:
    assert len(CASES) >= 20
    assert sorted(path.stem for path in GOLDEN.glob("*.txt")) == CASES
    assert not [c for c in CASES if "without a problem" in (GOLDEN / f"{c}.txt").read_text()]


def test_every_complaint_names_file_and_line_in_the_order_of_the_file() -> None:
    for case in CASES:
        lines = (GOLDEN / f"{case}.txt").read_text(encoding="utf-8").splitlines()
        parts = [line.split(":", 2) for line in lines]
        assert all(name == f"{case}.yaml" for name, _, _ in parts)
        numbers = [int(number) for _, number, _ in parts]
        assert numbers == sorted(numbers)


def test_a_file_that_is_not_there_or_no_text_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.yaml: cannot be read"):
        read_config(tmp_path / "nowhere.yaml")
    (tmp_path / "picture.yaml").write_bytes(b"\xff\xd8\xff\xe0")
    with pytest.raises(ConfigError, match=r"picture\.yaml: cannot be read"):
        read_config(tmp_path / "picture.yaml")


@pytest.mark.parametrize(
    "offload, trainer, said",
    [
        ("{engine: cuda}", "{accelerator: cpu}", "offload.engine: cuda runs on a GPU"),
        ("{engine: cudagraph}", "{accelerator: cpu}", "offload.engine: cudagraph runs on a GPU"),
        ("{engine: threads}", "{accelerator: gpu}", "offload.engine: threads runs on the CPU"),
    ],
)
def test_an_engine_that_cannot_run_on_the_accelerator_is_told_by_its_line(
    offload: str, trainer: str, said: str, tmp_path: Path
) -> None:
    text = f"{PLAIN}trainer: {trainer}\noffload: {offload}\n"
    [problem] = problems(text, tmp_path)
    assert re.match(r".+\.yaml:\d+: ", problem) and said in problem


# ---- right configurations -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("1e-3", 1e-3),
        ("5E-4", 5e-4),
        ("1e1", 10.0),
        ("1.5e+2", 150.0),
        (".5", 0.5),
        ("1", 1.0),
        ("0.05", 0.05),
    ],
)
def test_a_number_is_what_it_looks_like(written: str, meant: float, tmp_path: Path) -> None:
    config = read(f"{PLAIN}optimizer: {{lr: {written}}}\n", tmp_path)
    assert config.optimizer.lr == meant


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("8GiB", 8 << 30),
        ("1.5 MiB", 3 << 19),
        ("2 gb", 2 * 10**9),
        ("500KB", 500_000),
        ("7 B", 7),
        ("500000", 500_000),
        ("1e9", 10**9),
        ("1_000", 1000),
    ],
)
def test_a_size_is_bytes_or_a_number_with_a_unit(written: str, meant: int, tmp_path: Path) -> None:
    config = read(f"{PLAIN}loader: {{buffer_bytes: {written}}}\n", tmp_path)
    assert config.loader.buffer_bytes == meant
    assert parse_size(meant) == meant


def test_sizes_are_said_in_the_largest_unit_that_they_fill() -> None:
    said = [format_size(n) for n in (0, 1023, 1024, 154 << 20, 3 << 29, 5 << 40, 5 << 50)]
    assert said == ["0 B", "1023 B", "1.0 KiB", "154.0 MiB", "1.5 GiB", "5.0 TiB", "5120.0 TiB"]


def test_what_is_left_out_takes_the_defaults_and_is_written_out_complete(tmp_path: Path) -> None:
    config = read(PLAIN, tmp_path)
    dumped = dump_config(config)
    assert dumped["seed"] == 0
    assert dumped["loader"] == {
        "batch_size": 128,
        "buffer_batches": 12,
        "mode": "rolling",
        "workers": "auto",
        "worker_kind": "auto",
        "drop_last": False,
        "buffer_bytes": None,
        "backend": "native",
        "cache": None,
        "cache_bytes": None,
        "cache_dir": None,
        "cache_key": None,
        "on_error": "raise",
    }
    assert dumped["switch"] == {"rule": "fixed"}
    assert set(dumped) == set(RunConfig.model_fields)
    assert yaml.safe_load(yaml.safe_dump(dumped)) == dumped, "plain data, as YAML keeps it"


def test_offload_takes_the_arguments_of_the_strategy_with_their_defaults(tmp_path: Path) -> None:
    given = inspect.signature(OffloadStrategy.__init__).parameters
    defaults = {
        name: p.default for name, p in given.items() if name != "self" and p.kind != p.VAR_KEYWORD
    }
    assert read(PLAIN, tmp_path).offload is None
    section = read(f"{PLAIN}offload: {{}}\n", tmp_path).offload
    assert section is not None
    assert section.model_dump() == defaults


@pytest.mark.parametrize("budget", ["8GiB", "50%", "12.5 %", "1000000"])
def test_a_budget_stays_as_it_was_written(budget: str, tmp_path: Path) -> None:
    config = read(f"{PLAIN}offload: {{budget: {budget}, host_budget: 2 GiB}}\n", tmp_path)
    assert config.offload is not None
    assert str(config.offload.budget) == budget
    assert config.offload.host_budget == "2 GiB"
    assert read(yaml.safe_dump(dump_config(config)), tmp_path) == config
    OffloadStrategy(**config.offload.model_dump())


def write_golden() -> None:
    for path in sorted(GOLDEN.glob("*.yaml")):
        path.with_suffix(".txt").write_text(complaints(path), encoding="utf-8")


if __name__ == "__main__":
    write_golden()


def test_a_number_agrees_with_its_noun() -> None:
    nouns = ("task", "copy", "batch", "pass")
    assert [format_count(1, noun) for noun in nouns] == ["1 task", "1 copy", "1 batch", "1 pass"]
    assert [format_count(2000, noun) for noun in nouns] == [
        "2,000 tasks", "2,000 copies", "2,000 batches", "2,000 passes"
    ]  # fmt: skip
