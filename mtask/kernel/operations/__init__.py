"""Operations on tasks and workers, written once for the sync and the async store."""
