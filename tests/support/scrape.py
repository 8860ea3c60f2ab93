"""Read what a process exports to Prometheus."""

import urllib.request

from prometheus_client.parser import text_string_to_metric_families


def scrape(port, prefix):
    """Return the samples whose names begin with `prefix`, by the rest of the name and the labels' values."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=120) as answer:
        families = text_string_to_metric_families(answer.read().decode())
    found = {s.name + "".join(s.labels.values()): s.value for family in families for s in family.samples}
    return {name.removeprefix(prefix): value for name, value in found.items() if name.startswith(prefix)}
