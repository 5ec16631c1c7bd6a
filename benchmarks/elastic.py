"""An elastic job whose machines come, die and are taken away: seconds lost for each event, and whether any row was.

    python -m benchmarks.elastic               51 events in 17 jobs of one to four machines
    python -m benchmarks.elastic --jobs 2      fewer

Machines are agents of torchrun on this machine, with one process of gloo each (tools/testbed/elastic.py). What an event
costs: the seconds until the step under way, or a later one, begins in a round with all who are left. Processes are
forked and need no start of Python; with torchrun's command add what `python train.py` takes to its first step.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from statistics import median

from tools.testbed.elastic import ElasticTrials, Event
from tools.testbed.forkserver import ForkServer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=17, help="of three events each")
    jobs = parser.parse_args().jobs
    events: list[Event] = []
    wrong, furthest = 0, 0.0
    with tempfile.TemporaryDirectory() as folder, ForkServer("tools.testbed.elastic") as server:
        trials = ElasticTrials(server, Path(folder))
        for seed in range(jobs):
            trial = trials.run(seed)
            events += trial.events
            wrong, furthest = wrong + len(trial.faults), max(furthest, trial.difference)
            for event in trial.events:
                world = "{} -> {}".format(*event.world)
                print(f"{seed:>3}  {event.kind:<24}{world}  {event.lost_s:6.1f} s  {event.redone} redone", flush=True)
    print("\n".join(table(events)))
    print(f"steps with lost or repeated rows: {wrong}; largest difference of a final weight: {furthest:.1e}")


def table(events: list[Event]) -> list[str]:
    """Seconds lost and steps redone, by kind of event and over all."""
    lines = [f"{'':<24}{'events':>7}{'s lost, median':>16}{'most':>7}{'steps redone, most':>20}"]
    for kind in (*sorted({event.kind for event in events}), "all"):
        own = [event for event in events if kind in (event.kind, "all")]
        lost = [event.lost_s for event in own]
        redone = max(event.redone for event in own)
        lines.append(f"{kind:<24}{len(own):>7}{median(lost):>16.1f}{max(lost):>7.1f}{redone:>20}")
    return lines


if __name__ == "__main__":
    main()
