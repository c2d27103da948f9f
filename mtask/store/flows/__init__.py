"""Operations on flows: publish them, and tell the steps of a flow of each other's changes."""
