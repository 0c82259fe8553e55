"""The Celery app that clients and workers share: one place for its settings, and for sending tasks by name.

A task is a token, a hint that there is work: Celery on Redis both loses and repeats messages, and neither changes a
result here. See lua/lease.lua for what decides.
"""

from celery import Celery
from kombu.exceptions import OperationalError

from jobs.settings import Settings
from jobs.spec import model_key

CONTROL_QUEUE = "pm.control"
PLAN, ASSEMBLE, WORK = "pm.plan", "pm.assemble", "pm.work"

_KEY_PREFIX = "pm:bk:"
# Redelivery is not how work is recovered here (leases are, within a minute): a short one would only double messages.
_VISIBILITY_TIMEOUT_S = 12 * 3600


def model_queue(model: str) -> str:
    """The queue of the tokens for one model's shards."""
    return f"pm.m.{model_key(model)}"


def queue_key(queue: str) -> str:
    """The Redis list that holds a queue's messages."""
    return f"{_KEY_PREFIX}{queue}"


def make_app(settings: Settings) -> Celery:
    """A Celery app with the settings that were measured to survive a broker that restarts, fills up or fails over."""
    app = Celery("pagemill", broker=settings.broker_url)
    app.conf.update(
        task_serializer="json",
        result_serializer="json",
        accept_content=["json"],
        result_accept_content=["json"],
        task_ignore_result=True,
        result_backend=None,
        task_acks_late=True,
        task_acks_on_failure_or_timeout=True,
        task_reject_on_worker_lost=False,
        worker_prefetch_multiplier=1,
        worker_pool="threads",
        worker_cancel_long_running_tasks_on_connection_loss=False,
        worker_hijack_root_logger=False,
        worker_redirect_stdouts=False,
        worker_send_task_events=False,
        worker_soft_shutdown_timeout=0,
        worker_enable_soft_shutdown_on_idle=False,
        task_send_sent_event=False,
        task_default_queue=CONTROL_QUEUE,
        broker_connection_retry_on_startup=True,
        # The default gives up after 100 tries; a batch worker waits for its broker as long as it takes.
        broker_connection_max_retries=None,
        # Without this the worker process ends when Redis is full or read-only for a moment.
        broker_channel_error_retry=True,
        task_publish_retry=True,
        task_publish_retry_policy={"max_retries": 3, "interval_start": 0.2, "interval_step": 0.5, "interval_max": 2},
        visibility_timeout=_VISIBILITY_TIMEOUT_S,
        broker_transport_options={
            "visibility_timeout": _VISIBILITY_TIMEOUT_S,
            "socket_timeout": 10,
            "socket_connect_timeout": 5,
            "socket_keepalive": True,
            "health_check_interval": 25,
            "queue_order_strategy": "priority",
            "global_keyprefix": _KEY_PREFIX,
            "client_name": "pagemill-broker",
            "unacked_restore_interval": 10,
            "unacked_restore_throttle": 1,
        },
    )
    return app


class Tokens:
    """Sends tokens. A token that cannot be sent is no error: the sweeper sends another."""

    def __init__(self, app: Celery) -> None:
        self._app = app

    def send(self, task: str, *args: str, queue: str = CONTROL_QUEUE) -> bool:
        """Whether the broker took it. False does not prove that it did not."""
        try:
            self._app.send_task(task, args=args, queue=queue)
        except OperationalError:
            return False
        return True

    def assemble(self, job_id: str) -> None:
        """Tell a control worker that a job's shards are settled."""
        self.send(ASSEMBLE, job_id)

    def work(self, model: str, count: int) -> None:
        """Tell `count` slots of the model's workers that shards are ready."""
        for _ in range(count):
            if not self.send(WORK, model, queue=model_queue(model)):
                return
