"""Text-to-text tasks as data: what each reads, how it is written as text, and how it is scored."""

from altup.data.tasks.registry import SUITES, TASKS, find_task, find_tasks, register
from altup.data.tasks.task import Example, Task

__all__ = ["SUITES", "TASKS", "Example", "Task", "find_task", "find_tasks", "register"]
