"""Print lines per module and per layer, and the largest modules."""

from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "holdfast"
BIGGEST = 10


def main() -> None:
    lines = {
        path.relative_to(PACKAGE).as_posix(): path.read_text(encoding="utf-8").count("\n")
        for path in sorted(PACKAGE.rglob("*.py"))
    }
    layers = Counter[str]()
    for name, count in lines.items():
        layers[name.partition("/")[0].removesuffix(".py")] += count
        print(f"{count:6}  {name}")
    print("\nper layer")
    for layer, count in layers.most_common():
        print(f"{count:6}  {layer}")
    print(f"{sum(lines.values()):6}  all, in {len(lines)} modules")
    print(f"\nthe {min(BIGGEST, len(lines))} largest modules, the largest last")
    for name in sorted(lines, key=lines.__getitem__)[-BIGGEST:]:
        print(f"{lines[name]:6}  {name}")


if __name__ == "__main__":
    main()
