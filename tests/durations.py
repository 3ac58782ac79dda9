"""Print where the time of the tests goes: seconds and cases of each file, the longest first.

pytest -n 2 --junitxml=/tmp/tests.xml; python tests/durations.py /tmp/tests.xml
"""

from __future__ import annotations

import collections
import sys
import xml.etree.ElementTree

ROWS = 25


def main(path: str) -> None:
    seconds: collections.Counter[str] = collections.Counter()
    cases: collections.Counter[str] = collections.Counter()
    for case in xml.etree.ElementTree.parse(path).iter("testcase"):
        file = case.attrib["classname"].replace(".", "/") + ".py"
        seconds[file] += float(case.attrib["time"])  # type: ignore[assignment]  # a Counter of floats
        cases[file] += 1
    for file, spent in seconds.most_common(ROWS):
        print(f"{spent:8.1f} s {cases[file]:5} cases  {file}")
    print(f"{seconds.total():8.1f} s {cases.total():5} cases in {len(cases)} files")


if __name__ == "__main__":
    main(sys.argv[1])
