"""`pagemill bench jobs` with an S3 server on this machine: `rclone serve s3` on a folder, whose CPU time counts too.

python -m tests.bench.job_plane [--rows 100000] [--workers 2] [--json]
"""

import argparse
import tempfile
from pathlib import Path

from jobs.cli.show import print_json
from tests.servers import BUCKET, rclone_s3
from workers.bench import print_jobs_bench
from workers.bench_jobs import bench_jobs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="pagemill-bench-") as folder, rclone_s3(Path(folder) / "s3") as server:
        settings = server.settings(state_dir=Path(folder) / "state", redis_url="", storage=f"s3://{BUCKET}/bench")
        found = bench_jobs(options.rows, options.workers, settings, {"rclone": server.pid})
    print_json(found.as_dict()) if options.json else print_jobs_bench(found)


if __name__ == "__main__":
    main()
