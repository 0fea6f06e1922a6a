"""YAMLs that somebody made to harm whoever reads them: each is refused in short lines.
`tests/fuzz/fuzz_yaml.py` looks for more of them."""

from pathlib import Path

import pytest
from support.counted_calls import calls_of

from perfect.config.grid_reader import read_recipe, with_settings
from perfect.config.yaml_reader import MOST_BYTES, MOST_PROBLEMS, read_document
from perfect.errors import ConfigError

NINES = "".join(
    f"{one}: &{one} [{', '.join(f'*{before}' for _ in range(9))}]\n"
    for before, one in zip("abcdefgh", "bcdefghi", strict=True)
)
BOMB = f"a: &a [1, 1, 1, 1, 1, 1, 1, 1, 1]\n{NINES}"
MANY = r":\d+: there are more than 5,000 values"
DEEP = r":\d+: this is nested more than 40 deep"
RUN = "model: {name: resnet18}\ndata: {name: cifar10}\nphases: [{name: train, passes: 2}]\n"
GRID = f"{RUN}fleet: {{}}\ngrid:\n"
STRANGE = {
    "an alias bomb": (BOMB, MANY),
    "an alias bomb in a key": (f"{BOMB}? *i\n: 1\n", MANY),
    "an alias bomb of merges": (f"a: &a {{<<: [{'*a, ' * 9}]}}", DEEP),
    "many aliases": (f"a: &a 1\nx: [{'*a, ' * 6000}]", f"{MANY}, aliases counted in full"),
    "many keys": ("".join(f"k{n}: 1\n" for n in range(6000)), ":2500: there are more than 5,000"),
    "a list in itself": ("x: &x [*x]", DEEP),
    "a mapping in itself": ("&x {y: *x}", DEEP),
    "a key in itself": ("\n&x {? *x : 1}", ":2: the key on line 2 is no name"),
    "deep lists": (f"x: {'[' * 3000}{']' * 3000}", DEEP),
    "deep mappings": ("{a: " * 3000, DEEP),
    "deep blocks": ("x:\n  " + "- " * 3000, ":2: this is nested"),
    "deep keys": ("? " * 3000, DEEP),
    "5,000 digits": (f"\nseed: {'9' * 5000}", r":2: seed: '9+ \.\.\. .*not a value of the type"),
    "hexadecimal digits": (f"seed: 0x{'f' * 5000}", ":1: seed: '0xf+ .* not a value of the type"),
    "more than 64 bits": ("seed: 9223372036854775808", "is not a value of the type .*int"),
    "a number of base 60": (f"seed: 1{':1' * 60000}", "is not a value of the type .*int"),
    "a fraction of base 60": (f"seed: 1{':59' * 200}.5", "is not a value of the type .*float"),
    "not finite": ("optimizer: {lr: 1e999}", ":1: optimizer.lr: must be a finite number"),
    "code": ("seed: !!python/object/apply:os.mkdir [ran]", "not a value .*apply:os.mkdir"),
    "a name": ("seed: !!python/name:os.mkdir", "not a value of the type .*name:os.mkdir"),
    "code alone": ("!!python/object/apply:os.mkdir [ran]", "must have sections"),
    "an empty number": ("seed: !!int ''", "'' is not a value of the type .*int"),
    "no truth": ("seed: !!bool maybe", "'maybe' is not a value of the type .*bool"),
    "no date": ("seed: !!timestamp x", "'x' is not a value of the type .*timestamp"),
    "a thirteenth month": ("seed: 2001-13-01", "'2001-13-01' is not a value of the type"),
    "a day before all days": ("seed: 0001-01-01 00:00:00 +23:59", "seed: must be a valid integer"),
    "a set": ("seed: !!set {a, b}", "not a value of the type .*set"),
    "a tag of its own": ("seed: !x y", "'y' is not a value of the type !x"),
    "NUL": ("seed: 1\nx: \0\n", ":2: this is not YAML: unacceptable character #x0000"),
    "no character": ('\nx: "\\UFFFFFFFF"', ":2: this is not YAML"),
    "half a character": ('x: "\\ud800"', r":1: x: '\\ud800' is not a value of the type"),
    "half a character as a key": ('"\\ud800": 1', ":1: .*unicode"),
    "a terminal's commands": ('"\\e[2J\\n\\r": 1', r":1: \\x1b\[2J\\n\\r: unknown key"),
    "a long version": (f"%YAML 1.{'9' * 5000}\n---\na: 1\n", ":1: this is not YAML"),
    "a key given often": ("seed: 1\n" * 2000, f"only the first {MOST_PROBLEMS} problems are shown"),
    "many wrong phases": (f"phases: [{'{}, ' * 2000}]", "only the first"),
    "a long key": (f"? {'k' * 9000}\n: 1", ":1: the key on line 1 is no name"),
    "a long value": (f"seed: {'v' * 9000}", r"seed: must be a valid integer, not 'v+ \.\.\. v+'"),
    "a long place": (
        f"{GRID}  ? {'seed.' * 5000}\n  : [1]",
        ":5: grid: the key on line 6 is no",
    ),
    "a place of many digits": (
        f"{GRID}  ? phases.{'9' * 5000}\n  : [1]",
        ":5: grid: the key on line 6 is no",
    ),
    "steps that are none": (f"{RUN}augment: 3", ":4: augment: "),
    "two texts": ("seed: 1\n---\nseed: 2\n", ":2: this is not YAML: but found another document"),
    "large": (" " * (MOST_BYTES + 1), f": has more than {MOST_BYTES:,} bytes"),
}


@pytest.mark.parametrize(("text", "said"), STRANGE.values(), ids=STRANGE)
def test_a_strange_yaml_is_refused_in_short_lines(
    text: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = Path("run.yaml")
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=said) as refusal:
        read_recipe(path)
    problems = refusal.value.problems
    assert len(problems) <= MOST_PROBLEMS + 1
    assert all(len(one) < 600 and one.isprintable() for one in problems)
    assert [*tmp_path.iterdir()] == [tmp_path / "run.yaml"], "no code has run"


LARGE = {
    "unknown keys beside many values": "".join(f"k{n}: 1\n" for n in range(300))
    + f"{GRID}  optimizer.lr: [{', '.join(f'1e-{n}' for n in range(100))}]",
    "many keys of a grid": f"{GRID.replace('name: resnet18', 'class_path: a.B')}"
    + "".join(f"  model.init_args.k{n}: [1, 2]\n" for n in range(300)),
    "many paths that do not exist": GRID
    + "".join(f"  ? {','.join(f'k{n}{m}' for m in range(80))}\n  : [1, 2]\n" for n in range(100)),
}


@pytest.mark.parametrize("text", LARGE.values(), ids=LARGE)
def test_a_large_grid_that_is_wrong_is_refused_in_a_few_times_what_reading_it_takes(
    text: str, tmp_path: Path
) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(text, encoding="utf-8")
    reading = calls_of(lambda: read_document(path))

    def refuse() -> None:
        with pytest.raises(ConfigError):
            read_recipe(path)

    assert calls_of(refuse) < 10 * reading


def test_a_file_without_an_end_is_refused() -> None:
    with pytest.raises(ConfigError, match=f"/dev/zero: has more than {MOST_BYTES:,} bytes"):
        read_document(Path("/dev/zero"))


@pytest.mark.parametrize("value", ["&x [*x]", "[" * 300, "!!python/name:os.mkdir", "9" * 5000])
def test_a_strange_value_of_an_option_is_a_problem_of_the_option(
    value: str, tmp_path: Path
) -> None:
    (tmp_path / "run.yaml").write_text(RUN, encoding="utf-8")
    document = with_settings(read_document(tmp_path / "run.yaml"), [f"seed={value}"])
    assert len(document.problems) == 1 and "is not a value of YAML" in document.problems[0]


@pytest.mark.parametrize(
    "setting",
    [
        *(f"phases.{'9' * 5000}.passes=1", f"{'k' * 5000}=1", f"{'.' * 3000}=1", "\x1b[2J=1"),
        *("phases.-1.passes=1", "phases.\N{SUPERSCRIPT TWO}.passes=1", "=1", "seed=\ud800"),
    ],
    ids=lambda setting: ascii(setting[:20]),
)
def test_a_strange_option_is_refused_in_a_short_line(setting: str, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(RUN, encoding="utf-8")
    with pytest.raises(ConfigError) as refusal:
        read_recipe(tmp_path / "run.yaml", [setting])
    [problem] = refusal.value.problems
    assert problem.startswith("--set ") and len(problem) < 600 and problem.isprintable()
