"""A telemetry sink is any callable that takes a RoundEvent. This one keeps a histogram of accepted drafts by source."""

from collections import Counter

import dspark


class Histogram:
    """Counts rounds by (source, accepted drafts)."""

    def __init__(self):
        self.rounds = Counter()

    def __call__(self, event):
        for row in event.rows:
            self.rounds[row.source, row.accepted] += 1


def main(engine=None, prompt="Write the numbers from 1 to 20, then write them again.", max_tokens=120):
    engine = engine or dspark.load("smollm2-135m").bind()
    histogram = Histogram()
    with engine.open(prompt, max_tokens=max_tokens, sinks=[histogram]) as session:
        list(session)
    for (source, accepted), rounds in sorted(histogram.rounds.items()):
        print(f"{source:8} {accepted:2} accepted: {'#' * rounds}")
    return histogram.rounds


if __name__ == "__main__":
    main()
