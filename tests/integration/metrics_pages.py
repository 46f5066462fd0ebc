"""The metrics pages of a cluster, found and read as Prometheus does."""

from __future__ import annotations

from dataclasses import dataclass

import httpx
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from dpray.workers.metrics import METRICS
from tests.clusters import TOKEN
from tests.integration.processes import MARKER, TIMEOUT, Cluster

RAYS_OWN_TAGS = {
    "Component", "JobId", "NodeAddress", "NodeId", "SessionName", "Version", "WorkerId", "ip",
    "pid",
}  # fmt: skip


@dataclass(frozen=True)
class Pages:
    cluster: Cluster

    def text(self) -> str:
        listed = httpx.get(
            f"{self.cluster.dashboard}/api/prometheus/sd",
            headers={"Authorization": f"Bearer {TOKEN}"},
            timeout=TIMEOUT,
        )
        targets = [target for group in listed.json() for target in group["targets"]]
        pages = [f"http://{target}/metrics" for target in set(targets)]
        return "\n".join(httpx.get(page, timeout=TIMEOUT).text for page in pages)

    def samples(self) -> list[Sample]:
        """dpray's own."""
        return [
            sample
            for family in text_string_to_metric_families(self.text())
            for sample in family.samples
            if "dpray" in sample.name
        ]

    def value(self, name: str, **tags: str) -> float | None:
        """The value with these tags, or None."""
        found = [
            sample.value
            for sample in self.samples()
            if sample.name == name and tags.items() <= sample.labels.items()
        ]
        assert len(found) < 2, found
        return found[0] if found else None

    def of_dataset(self, dataset: str) -> dict[str, float]:
        """What runs show of the data set, by names without what all of them begin with."""
        return {
            sample.name.removeprefix("ray_dpray_"): sample.value
            for sample in self.samples()
            if sample.labels["dataset"] == dataset and "run" not in sample.labels
        }

    def assert_public(self, dataset: str, rows: int) -> None:
        """No private word on any page; of dpray only what it declares, with the declared tags, and
        of a data set not the number of its private rows."""
        assert MARKER.decode() not in self.text()
        ends = {"counter": "_total", "gauge": ""}
        declared = {f"ray_{each.name}{ends[each.kind]}": set(each.tags) for each in METRICS}
        samples = self.samples()
        assert samples
        for sample in samples:
            tags = {tag for tag in sample.labels if not tag.startswith("otel_")} - RAYS_OWN_TAGS
            assert tags == declared[sample.name], sample
            assert sample.labels["dataset"] != dataset or sample.value != rows, sample
