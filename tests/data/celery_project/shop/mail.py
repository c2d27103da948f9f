from celery import shared_task
from celery.utils.log import get_task_logger

logger = get_task_logger(__name__)


@shared_task(ignore_result=True)
def send_email(to, subject="hi", **headers):
    logger.info("to %s", to)
    return f"{subject} to {to} {headers}"
