"""``hyper-parallel clusters``: published machines, the source of each of their numbers, and files to start from."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hyper_parallel.cli.arguments import as_json, check_folder, write

if TYPE_CHECKING:
    from hyper_parallel.cluster import Cluster

_UNITS = (
    (("bytes",), 1e9, "GB"),
    (("bandwidth", "read", "write"), 1e9, "GB/s"),
    (("latency", "setup", "launch"), 1e-6, "µs"),
)
"""The last word of a number's path, its unit and the unit's name."""


@click.command(short_help="List published machines, with the sources of their numbers.")
@click.argument("name", required=False)
@click.option(
    "--out",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write the machine NAME as a cluster file to start from.",
)
@as_json
def clusters(name: str | None, out: Path | None, as_json: bool) -> None:
    """List the machines that --cluster knows; with NAME one of them, with the source of each number.

    A number that its maker does not publish is an estimate, and says how it was estimated. NAME may also be a
    cluster file, or a name with a number of devices such as h100x64.

    \b
    Examples:
      hyper-parallel clusters
      hyper-parallel clusters rtx4090
      hyper-parallel clusters rtx4090x8 --out mine.yaml
      hyper-parallel plan --model llama-3-8b --cluster mine.yaml --batch 64 --lora-rank 16

    \b
    Exit codes:
      0    listed, or written
      2    an unknown name, or a file that cannot be read or written; the error is one line
    """
    from hyper_parallel.cluster import Cluster
    from hyper_parallel.cluster.files import plain, text
    from hyper_parallel.errors import ConfigError

    if name is None:
        if out is not None:
            raise click.UsageError("--out writes one machine; name it, as in rtx4090x8")
        _list(as_json)
        return
    cluster = Cluster.named(name)
    if out is None:
        click.echo(json.dumps(plain(cluster), indent=2) if as_json else _sources(cluster))
        return
    check_folder("--out", out)
    content = text(cluster)
    if out.exists() and out.read_text(encoding="utf-8", errors="replace") != content:
        raise ConfigError(f"--out {out}: exists with other content; name another file")
    write("--out", out, content, f" (hyper-parallel plan --cluster {out} …)")


def _list(as_json: bool) -> None:
    from hyper_parallel.cluster import Cluster
    from hyper_parallel.cluster.presets import names

    rows = [_row(Cluster.preset(name)) for name in names()]
    if as_json:
        click.echo(json.dumps(rows, indent=2))
        return
    from hyper_parallel.report.sheets import Sheet
    from hyper_parallel.report.table import sheet_text, terminal_width

    levels = ("node", "network", "host")
    sheet = Sheet(
        "",
        (
            *("name", "machine", "devices", "memory GB", "TFLOP/s", "memory GB/s"),
            *(f"{level} GB/s" for level in levels),
            "estimates",
        ),
        tuple(
            (
                row["name"],
                row["machine"],
                " · ".join(str(row[level]) for level in ("node", "supernode") if row[level]),
                f"{row['memory_bytes'] / 1e9:.0f}",
                f"{row['flops'] / 1e12:.0f}",
                f"{row['memory_bandwidth'] / 1e9:,.0f}",
                *(f"{row['links'].get(level, 0.0) / 1e9:.3g}" for level in levels),
                f"{row['estimates']} of {row['numbers']}",
            )
            for row in rows
        ),
        left=2,
        drop=("machine", "host GB/s", "estimates"),
        note="devices: of a node, and of a supernode\n"
        "TFLOP/s: of matrix products in bfloat16 (V100: float16), without sparsity\n"
        "node, network, host: a device's link, one way, as the maker states it",
    )
    click.echo(sheet_text(sheet, terminal_width()))
    click.echo("next: hyper-parallel clusters NAME (its sources; --out mine.yaml writes a file)")


def _row(cluster: Cluster) -> dict[str, Any]:
    """What the list says of a machine; bytes, B/s and FLOP/s."""
    device = cluster.device
    assert device is not None, cluster.name
    return {
        "name": cluster.name,
        "machine": cluster.source,
        "device": device.name,
        "node": cluster.node,
        "supernode": cluster.supernode,
        "memory_bytes": device.memory.bytes,
        "memory_bandwidth": device.memory.read,
        "flops": device.peak("bfloat16"),
        "links": {level: link.bandwidth for level, link in cluster.links.items()},
        "estimates": len(cluster.estimates),
        "numbers": len(cluster.sources) + len(cluster.estimates),
    }


def _sources(cluster: Cluster) -> str:
    """A machine's numbers, each with its source."""
    from hyper_parallel.cluster.files import plain
    from hyper_parallel.report.sheets import Sheet
    from hyper_parallel.report.table import sheet_text, terminal_width

    tree = plain(cluster)
    tree.pop("sources", None), tree.pop("estimates", None)
    rows = []
    for path, value in _leaves(tree):
        if isinstance(value, str):
            continue
        # A memory with one bandwidth states it as that of reads.
        paths = (path, path.removesuffix(".write") + ".read")
        known = next((cluster.sources[found] for found in paths if found in cluster.sources), "")
        guess = next((cluster.estimates[found] for found in paths if found in cluster.estimates), "")
        rows.append((path, known or (f"estimate: {guess}" if guess else ""), _value(path, value)))
    sheet = Sheet("", ("number", "source", "value"), tuple(rows), left=2)
    about = f"{cluster.name or 'cluster'}: {cluster.source}" if cluster.source else cluster.name
    return f"{about}\n{sheet_text(sheet, terminal_width())}"


def _leaves(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if not isinstance(tree, dict):
        yield path, tree
        return
    for key, value in tree.items():
        yield from _leaves(value, f"{path}.{key}" if path else key)


def _value(path: str, value: Any) -> str:
    """A number in the unit of its kind; of tables the best shares or the number of points."""
    *folders, leaf = path.split(".")
    if isinstance(value, list):
        tables = [table for table in value if isinstance(table, dict)]
        best = dict.fromkeys(
            f"{len(table['points'])} points" if "points" in table else f"best {table.get('best', 1.0):g}"
            for table in tables
        )
        if not tables:
            return f"{len(value)} points"
        return ", ".join(best) if len(best) <= 2 else f"{len(tables)} tables"
    if isinstance(value, int):
        return str(value).lower()
    if folders and folders[-1] in ("matrix", "vector"):
        return f"{value / 1e12:g} TFLOP/s"
    for words, unit, shown in _UNITS:
        if leaf in words:
            return f"{value / unit:,.6g} {shown}"
    return f"{value:g}"
