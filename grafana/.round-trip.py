#!/usr/bin/env python3
"""Reads dashboards/*.json into the types of Grafana's own SDK, and writes them again.

A field that the types do not know is lost on the way: a word that Grafana would not understand. Says which,
and ends with 1. Needs grafana-foundation-sdk; `./run check grafana` gets it.
"""

import json
import pathlib
import sys

from grafana_foundation_sdk.cog import encoder, plugins
from grafana_foundation_sdk.models.dashboard import Dashboard


def lost(before, after, place):
    """What is in the first and is not, or is another, in the second."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key, value in before.items():
            if key in after:
                yield from lost(value, after[key], f"{place}.{key}")
            else:
                yield f"{place}.{key} is not known"
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for index, (one, other) in enumerate(zip(before, after)):
            yield from lost(one, other, f"{place}[{index}]")
    elif before != after:
        yield f"{place}: {before!r} becomes {after!r}"


def main():
    plugins.register_default_plugins()
    folder = pathlib.Path(__file__).resolve().parent / "dashboards"
    files = sorted(folder.glob("*.json"))
    faults = 0 if files else 1
    for file in files:
        before = json.loads(file.read_text())
        after = json.loads(encoder.JSONEncoder().encode(Dashboard.from_json(before)))
        for fault in lost(before, after, file.stem):
            print(fault, file=sys.stderr)
            faults += 1
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
