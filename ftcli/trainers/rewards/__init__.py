"""Rewards: built-in ones and the user's functions, behind one checked call."""

from ftcli.trainers.rewards.build import Reward, build_rewards

__all__ = ["Reward", "build_rewards"]
