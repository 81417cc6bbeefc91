"use strict";
(() => {
  const choice = document.getElementById("step-choice");
  if (!choice) return;
  const buttons = document.querySelectorAll("button[data-step]");
  const show = (step) => {
    choice.value = step;
    for (const panel of document.querySelectorAll("div.step")) panel.hidden = panel.dataset.step !== step;
    for (const button of buttons) button.setAttribute("aria-pressed", String(button.dataset.step === step));
  };
  choice.addEventListener("change", () => show(choice.value));
  for (const button of buttons) button.addEventListener("click", () => show(button.dataset.step));
  document.querySelector(".controls").hidden = false;
  show(choice.value);
})();
