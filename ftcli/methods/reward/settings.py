"""The section ``reward``."""

from __future__ import annotations

from pydantic import Field

from ftcli.config.base import Rate, Section


class RewardModelConfig(Section):
    """Training of reward models (`train.method: reward`)."""

    margin: bool = Field(
        default=False,
        description="Ask for a lead of each row's column `margin`. `data.columns` maps another name.",
    )
    center_rewards_coefficient: Rate = Field(
        default=0.0,
        description="Weight of the squared sum of both scores of a pair, which keeps scores around 0; 0.01 is usual.",
    )
