"""Operations on the collection of tasks."""
