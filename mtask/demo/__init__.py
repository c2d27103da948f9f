"""The demo: worker processes count real files, and one worker is killed while it holds tasks."""
