"""`make_plan` makes the frozen plan of topics from a configuration."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from dpray.accounting.event import Event
from dpray.config.config import Config
from dpray.io.formats import FilePart
from dpray.io.languages import topic_words
from dpray.io.public_files import public_files
from dpray.mechanisms.monte_carlo import Target, votes_target
from dpray.mechanisms.topics import words_of
from dpray.mechanisms.votes import NOISE_MULTIPLIERS, VoteHistogram
from dpray.methods.topics.settings import TopicsSettings
from dpray.runs.plan import Plan, resolved_noise_multiplier, within_epsilon
from dpray.types import InputError
from dpray.workers.rows import Row, record_rows


@dataclass(frozen=True)
class TopicsPlan(Plan):
    """The plan of topics; the texts of `public` are clustered.

    Guarantee: add or remove one unit. A private record adds one to one count: that of its label and
    of the topic whose mean is nearest to its embedding. This is a vote for one of T public vectors.
    The whole histogram, over the counts of all labels together, is ONE application of `votes`, so
    the method costs `method_event`. The threshold and the sequences are post-processing.
    Proof: docs/privacy.md, section 3.6.
    """

    settings: TopicsSettings
    votes: VoteHistogram
    public: Sequence[Row] = field(repr=False)

    @property
    def method_event(self) -> Event:
        return self.votes.dp_event

    @property
    def least_count(self) -> float:
        """Return the threshold H as a count of records."""
        return self.settings.threshold * self.votes.noise_std

    def check_embedder(self) -> None:
        from dpray.workers.shards import check_voters  # late: it imports Ray, and a plan needs none

        check_voters(self.config)

    def audit_targets(self) -> Iterator[Target]:
        yield votes_target("topic histogram", self.votes)

    @property
    def noise_multiplier(self) -> float:
        return self.votes.noise_multiplier

    def method_summary(self) -> dict[str, object]:
        return {
            "method": self.settings.model_dump() | {"noise_multiplier": self.noise_multiplier},
            "records": self.settings.records,
            "llm_calls": 0,
            "noise_multiplier": self.noise_multiplier,
            "warnings": [],
        }

    def lines(self) -> dict[str, str]:
        settings = self.settings
        counts = len(self.proportions) * settings.topics
        mean = self.config.data.public_size / counts
        return {
            "topics": f"{settings.topics} of {len(self.public):,} public texts, named by "
            f"{settings.words} words each",
            "histogram": f"{counts:,} counts, of {mean:.3g} records on average, with "
            f"noise of standard deviation {self.votes.noise_std:.3g}; a count below "
            f"{self.least_count:.3g} is 0",
            "records": f"{settings.records:,}, {settings.words} terms each",
            "LLM calls": "none",
        }


def make_plan(config: Config, settings: TopicsSettings) -> TopicsPlan:
    """Resolve everything that is null; reads the public texts. Raises InputError if the keys
    together cost more than `privacy.epsilon`."""
    public, k = read_public(config, settings), config.data.max_records_per_unit

    def votes(z: float) -> VoteHistogram:
        """Return the mechanism with noise multiplier z."""
        return VoteHistogram(z * k, k)

    def event(z: float) -> Event:
        return votes(z).dp_event

    z = resolved_noise_multiplier(config, settings.noise_multiplier, event, NOISE_MULTIPLIERS)
    assert z is not None  # a chain with topics has a finite epsilon
    plan = TopicsPlan(config, config.data.proportions, settings, votes(z), public)
    return within_epsilon(plan, z)


def read_public(config: Config, settings: TopicsSettings) -> list[Row]:
    """Read the public records whose texts have words. Raises InputError for a row without the
    configuration's columns and labels, which it names, and for fewer texts than topics."""
    data = config.data.of_public_files()
    files = public_files(settings.public, "method.public", config.data.path)
    words_in = words_of(*topic_words(config.data.language))
    try:
        records = [record for file in files for record in record_rows(FilePart(file), data)]
    except InputError as error:
        raise InputError(f"method.public: {error}") from None
    worded = [record for record in records if words_in(record["text"])]
    if len(worded) < settings.topics:
        raise InputError(
            f"method.topics: {settings.topics} topics need as many texts, but only {len(worded)} "
            f"in method.public {settings.public} have words"
        )
    return worded


def public_terms(plan: TopicsPlan) -> set[str]:
    """Return all words that may name a topic."""
    words_in = words_of(*topic_words(plan.config.data.language))
    return {word for record in plan.public for word in words_in(record["text"])}
