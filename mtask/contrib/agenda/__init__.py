"""Jobs of Agenda are moved to mtask: those that wait become tasks, and repeating ones become schedules."""
