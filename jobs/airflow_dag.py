"""An Airflow DAG that makes one release on a Ray cluster. Link it into the folder of your DAGs.

A retry is the same command, so it resumes the run and charges nothing more. For the same reason
the path is fixed: a second run of the DAG finds the release finished. Another `output.path` would
be another release, with a charge of its own; so the DAG has no schedule.
"""

from datetime import timedelta
from pathlib import Path

from airflow.providers.standard.operators.bash import BashOperator
from airflow.sdk import DAG

with DAG("dpray_release", schedule=None, catchup=False, max_active_runs=1):
    BashOperator(
        task_id="run",
        # Not Airflow's own Python. The worker's environment has the variables of the cluster:
        # RAY_API_SERVER_ADDRESS, RAY_AUTH_MODE and RAY_AUTH_TOKEN.
        bash_command=".venv/bin/python jobs/submit.py jobs/private_prediction_gpu.yaml "
        "data.path=s3://my-bucket/agnews/private.jsonl output.path=/mnt/dpray/out/agnews",
        # Ray copies this folder to the cluster: it must hold no private data.
        cwd=str(Path(__file__).resolve().parents[1]),
        retries=5,
        retry_delay=timedelta(minutes=10),
    )
