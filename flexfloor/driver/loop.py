"""The main job: rollout, reward, train, sync weights, step by step."""

import asyncio
import logging
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType

from flexfloor.config import TrainConfig
from flexfloor.data.order import PromptOrder
from flexfloor.data.rewards import RewardPool
from flexfloor.driver.batch import step_requests, train_sequences
from flexfloor.driver.figures import step_metrics
from flexfloor.driver.prepare import prepare_model
from flexfloor.driver.prompts import TokenizedPrompt, Tokenizer, load_tokenized_prompts, load_tokenizer
from flexfloor.driver.rollout_phase import RolloutPhase
from flexfloor.driver.services import Services, private_socket_dir
from flexfloor.processes import ChildProcesses
from flexfloor.report.console import RunConsole, summary_rows
from flexfloor.report.metrics import MetricsLog, read_metrics
from flexfloor.training.client import TrainerClient

logger = logging.getLogger(__name__)
