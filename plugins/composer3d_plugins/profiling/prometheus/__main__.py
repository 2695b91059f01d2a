"""Dashboard and alert rules for the metrics: `python -m composer3d_plugins.profiling.prometheus dashboard|rules`."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

__all__ = ["main"]

PANELS = {
    "Loss": ("composer3d_loss", "short"),
    "Gradient norm": ("composer3d_grad_norm", "short"),
    "Tokens or samples per second": ("{__name__=~'composer3d_(tokens|samples)_per_s'}", "short"),
    "Step time": ("composer3d_step_time_s", "s"),
    "Waiting for data": ("composer3d_data_wait_s", "s"),
    "Computing, longest and mean": ("{__name__=~'composer3d_computing_(max|mean)_s'}", "s"),
    "Memory used": ("composer3d_memory_used_ratio", "percentunit"),
    "Skipped steps": ("composer3d_skipped_steps", "short"),
}
RULES = (
    ("Composer3dStalled", "time() - composer3d_last_step_timestamp_seconds > 300", "1m", "no step ended in 5 minutes"),
    ("Composer3dLossNotFinite", "composer3d_loss_is_finite == 0", "0m", "the loss is NaN or infinite"),
    (
        "Composer3dStraggler",
        "composer3d_computing_max_s / composer3d_computing_mean_s > 1.5",
        "5m",
        "a rank computes half as long again as the mean of all",
    ),
    ("Composer3dSlowRank", "composer3d_slow_rank >= 0", "0m", "a rank was slow for several steps in a row"),
    ("Composer3dMemory", "composer3d_memory_used_ratio > 0.95", "1m", "a rank's memory is nearly full"),
)


def dashboard() -> str:
    """Return a Grafana dashboard as JSON."""
    panels: list[dict[str, Any]] = [
        {
            "id": number + 1,
            "title": title,
            "type": "timeseries",
            "gridPos": {"h": 8, "w": 12, "x": 12 * (number % 2), "y": 8 * (number // 2)},
            "fieldConfig": {"defaults": {"unit": unit}, "overrides": []},
            "targets": [{"expr": query, "refId": "A"}],
        }
        for number, (title, (query, unit)) in enumerate(PANELS.items())
    ]
    return json.dumps({"title": "composer3d", "schemaVersion": 39, "refresh": "10s", "panels": panels}, indent=1)


def rules() -> str:
    """Return alert rules as Prometheus reads them: YAML, of which JSON is a part."""
    entries = [
        {"alert": name, "expr": query, "for": duration, "annotations": {"summary": summary}}
        for name, query, duration, summary in RULES
    ]
    return json.dumps({"groups": [{"name": "composer3d", "rules": entries}]}, indent=1)


def main(argv: list[str] | None = None) -> int:
    """Print one of the two."""
    parser = argparse.ArgumentParser(prog="python -m composer3d_plugins.profiling.prometheus")
    parser.add_argument("what", choices=("dashboard", "rules"))
    what = parser.parse_args(argv).what
    sys.stdout.write((dashboard() if what == "dashboard" else rules()) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
