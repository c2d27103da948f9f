"""A small shop: orders, their mails as tasks, a report each morning, and the admin.

In this folder, with MTASK_URI for a MongoDB that is a replica set:

  python manage.py migrate --run-syncdb && python manage.py runserver
  python manage.py mtask_worker

It takes `pip install '.[django]' django-mongodb-backend` in a clone of mtask. Then:

  curl localhost:8000/orders/7 --json '{"item": "book", "to": "ada@example.com"}'
  curl localhost:8000/orders/7
"""

import os
import sys

from django.core.management import execute_from_command_line

if __name__ == "__main__":
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "shop.settings")
    execute_from_command_line(sys.argv)
