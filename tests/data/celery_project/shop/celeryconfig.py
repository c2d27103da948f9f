timezone = "Europe/Berlin"
task_serializer = "json"
accept_content = ["json"]
task_acks_late = True
worker_prefetch_multiplier = 1
task_routes = {"shop.mail.*": {"queue": "mail"}}
