"""Orders."""

from django.db import models


class Order(models.Model):
    """An order of one item."""

    number = models.IntegerField(unique=True)
    item = models.CharField(max_length=100)
    to = models.EmailField()
    mailed = models.BooleanField(default=False)

    def __str__(self):
        return f"{self.number}: {self.item}"
