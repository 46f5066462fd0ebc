"""Submit a configuration to a Ray cluster, follow its log, and end as the run ends.

    python jobs/submit.py jobs/private_prediction_gpu.yaml output.path=/mnt/dpray/agnews

Like `ray job submit --working-dir . -- dpray run ...`, which ends with 1 whatever went wrong; this
ends with dpray's own exit code: 0 done, 2 bad input or configuration (or no cluster that takes the
job), 3 budget refused, 4 finished in part or stopped (the same command goes on), 1 anything else.
The cluster's address and token are Ray's: RAY_API_SERVER_ADDRESS, RAY_AUTH_MODE, and RAY_AUTH_TOKEN
or the file of `ray get-auth-token`. Ctrl-C stops the following; the job goes on.
"""

from __future__ import annotations

import asyncio
import shlex
import sys

from ray.job_submission import JobStatus, JobSubmissionClient

STOPPED = 4


def main(arguments: list[str]) -> int:
    if not arguments:
        print("usage: python jobs/submit.py CONFIG [KEY=VALUE ...]", file=sys.stderr)
        return 2
    return run_job(shlex.join(["dpray", "run", *arguments]))


def run_job(entrypoint: str) -> int:
    """Submit a command, with this folder as its working directory; return the code to end with."""
    try:
        client = JobSubmissionClient()
        job = client.submit_job(entrypoint=entrypoint, runtime_env={"working_dir": "."})
    except Exception as error:  # Ray raises many kinds; what they say holds no text of ours
        said = (str(error).strip().splitlines() or [type(error).__name__])[0]
        print(f"no cluster took the job: {said}", file=sys.stderr)
        return 2
    print(f"job {job}; `ray job stop {job}` stops it", file=sys.stderr)
    try:
        asyncio.run(follow(client, job))
        return exit_code(client, job)
    except (KeyboardInterrupt, Exception):  # Ctrl-C, or the connection is lost
        print(f"job {job} goes on; `ray job logs --follow {job}` shows it", file=sys.stderr)
        return 1


async def follow(client: JobSubmissionClient, job: str) -> None:
    async for lines in client.tail_job_logs(job):
        print(lines, end="", flush=True)


def exit_code(client: JobSubmissionClient, job: str) -> int:
    """Return the code of a job that has ended, and say how it ended."""
    info = client.get_job_info(job)
    print(f"job {job}: {info.status}", file=sys.stderr)
    if info.status == JobStatus.STOPPED:
        print("stopped; the same command goes on, at no further cost", file=sys.stderr)
        return STOPPED
    return info.driver_exit_code if info.driver_exit_code in (0, 2, 3, 4) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
